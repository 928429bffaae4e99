"""`bench tasks`: many tasks of several PEFT methods over one BERT with random weights, as in the PetS paper.

Four comparisons in one run: the memory of all tasks with that of a full copy per task; a batch of rows of many tasks
with one task after the other; the same with the split model, where round trips count; and coordinated batching with
batches of fixed size.
"""

import contextlib
import copy
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer
from peft import IA3Config, LoraConfig, OFTConfig, PeftConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from tenant.bench.measured_models import Bert, Effort, MaskingVariant, provide, remote_config
from tenant.bench.options import Progress, benchmark
from tenant.bench.processes import check_supported, resources
from tenant.bench.report import Goal, Row, Value, figure, where
from tenant.model.hf import backend_of
from tenant.model.ledger import ledger_of, since
from tenant.model.loading import load_model
from tenant.session.tally import Ledger
from tenant.tasks import coordinated as batching
from tenant.tasks.adapter import CONFIG, TENSORS
from tenant.tasks.registry import Tasks

_LONGEST, _TASKS = 128, 128  # longest request in tokens, and number of tasks in the queue, as in the paper's traffic
_MIB = 1 << 20
_METHODS: Final[dict[str, PeftConfig]] = {
    "LORA": LoraConfig(r=8, target_modules=["query", "value"]),
    "IA3": IA3Config(target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]),
    "OFT": OFTConfig(oft_block_size=32, target_modules=["query", "value"]),
    "VERA": VeraConfig(r=256, target_modules=["query", "value"]),
}


_MEAN, _SIGMA, _SIZE = 32.0, 8.0, 32  # tokens of a queued request, as in the PetS paper; requests of a fixed batch
_ROWS, _TOKENS = 32, 8  # of a mixed batch, each row of another task
_BERT_BASE, _EFFORT = Bert(), Effort()


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for measurement, variant, what, at_least in (
        ("memory", "one model", "tasks in the memory of as many full copies", 26),
        ("batch, whole model", "mixed batch", "time of one task after the other over a mixed batch's, whole", 2),
        ("batch, split model", "mixed batch", "round trips of one task after the other over a mixed batch's", 10),
        ("coordinated batching", "coordinated", "time of batches of fixed size over coordinated ones'", 1.2),
    ):
        for row in where(rows, measurement=measurement, variant=variant):
            yield Goal(what, figure(row, "gain"), at_least=at_least)


@benchmark("tasks", goals=goals)
def tasks(
    folder: Path,
    progress: Progress,
    *,
    shape: Bert = _BERT_BASE,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks; PEFT methods alternate.")] = 256,
    requests: Annotated[int, typer.Option(min=1, help="Queued requests of coordinated batching.")] = 256,
    effort: Effort = _EFFORT,
) -> Iterator[Row]:
    """Serve many tasks over one BERT: memory, mixed batches (whole and split), coordinated batching (PetS).

    The column "gain" is the measured quantity of the first variant divided by that of this variant. The whole model is
    measured while no other process works, with the threads of tenant and executor together.

    Example: symbiosis-priv bench tasks --tasks 64 --layers 4
    """
    check_supported()
    path = shape.save(folder / "model")
    progress("writing tasks")
    repository = write_tasks(folder / "tasks", path, count=tasks)
    rows = min(_ROWS, tasks)
    torch.set_num_threads(2 * effort.threads)
    model = load_model(path, dtype=torch.float32, kind=AutoModel)
    serving = Tasks(model, memory_limit=1 << 40)
    names = [task.name for task in serving.register_all(repository)]
    progress("loading tasks")
    yield from _memory(serving, names)
    progress("a mixed batch, whole")
    yield from _batch(serving, names[:rows], effort.repeat, measurement="batch, whole model")
    progress("coordinated batching")
    yield from _coordinated(serving, names, requests, progress)
    serving.close()
    del model, serving
    progress("a mixed batch, split")
    torch.set_num_threads(effort.threads)
    with provide(path, folder, threads=effort.threads) as local:
        remote = remote_config(local, MaskingVariant.parse("pad"), effort)
        split = load_model(path, remote=remote, dtype=torch.float32, kind=AutoModel)
        with backend_of(split), contextlib.closing(Tasks(split)) as serving:
            serving.register_all(repository)
            # one turn, because the round trips are the same in every turn
            yield from _batch(serving, names[:rows], 1, measurement="batch, split model")


def write_tasks(repository: Path, model: Path, *, count: int) -> Path:
    """Write `count` task folders with random parameters; the methods alternate."""
    base = load_model(model, dtype=torch.float32, kind=AutoModel)
    for name, config in _METHODS.items():
        adapted: Any = get_peft_model(copy.deepcopy(base), copy.deepcopy(config))
        adapted.save_pretrained(str(repository / f".{name}"))
        del adapted
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        template = repository / f".{list(_METHODS)[number % len(_METHODS)]}"
        folder = repository / f"task-{number:03}"
        folder.mkdir()
        (folder / CONFIG).write_bytes((template / CONFIG).read_bytes())
        tensors = load_file(template / TENSORS)
        for name, tensor in tensors.items():
            if name.startswith("base_model.vera_"):  # all tasks of one seed have these projections
                continue
            tensors[name] = tensor + 0.02 * torch.randn(
                tensor.shape, generator=generator, dtype=torch.float32, device="cpu"
            )
        save_file(tensors, folder / TENSORS)
    return repository


def _row(measurement: str, variant: str, **figures: Value) -> Row:
    columns = ("tasks", "rows", "tokens", "batches", "variant", "memory_mib", "wall_s", "round_trips", "gain")
    return {"measurement": measurement, **dict.fromkeys(columns), "variant": variant, **figures}


def _memory(tasks: Tasks, names: Sequence[str]) -> Iterator[Row]:
    """Measure the process's resident memory before and after loading, which includes Python objects."""
    copies = sum(parameter.nbytes for parameter in tasks.model.parameters())
    gc.collect()
    before = resources([os.getpid()]).bytes
    start = time.perf_counter()
    for name in names:
        tasks.load(name)
    seconds = time.perf_counter() - start
    gc.collect()
    grown = max(tasks.bytes, resources([os.getpid()]).bytes - before)
    row, whole, shared = partial(_row, "memory", tasks=len(names)), len(names) * copies, copies + grown
    yield row("a full copy per task", memory_mib=whole / _MIB, gain=1.0)
    yield row("one model", memory_mib=shared / _MIB, wall_s=seconds, gain=whole / shared)


def _batch(tasks: Tasks, names: Sequence[str], repeat: int, *, measurement: str) -> Iterator[Row]:
    """Measure the median seconds and the round trips to executors of a turn (None for a whole model)."""
    ids = _ids(len(names), _TOKENS)

    def one_after_the_other() -> None:
        for row, name in enumerate(names):
            with tasks.batch([name]):
                _forward(tasks, ids[row : row + 1])

    def mixed() -> None:
        with tasks.batch(names):
            _forward(tasks, ids)

    split = hasattr(tasks.model, "hf_quantizer")
    first: tuple[float, int] | None = None
    for variant, work in {"one task after the other": one_after_the_other, "mixed batch": mixed}.items():
        work()
        before, times = (ledger_of(tasks.model) if split else None) or Ledger(), []
        for _ in range(repeat):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        after = (ledger_of(tasks.model) if split else None) or before
        trips, seconds = since(before, after).executor_round_trips // repeat, statistics.median(times)
        first = first or (seconds, trips)
        yield _row(
            measurement,
            variant,
            tasks=len(names),
            rows=len(names),
            tokens=_TOKENS,
            batches=1 if work is mixed else len(names),
            wall_s=seconds,
            round_trips=trips if split else None,
            gain=first[1] / trips if split else first[0] / seconds,
        )


def _coordinated(tasks: Tasks, names: Sequence[str], count: int, progress: Progress) -> Iterator[Row]:
    """Queue `count` requests, with normally distributed lengths and uniformly distributed tasks. Measure all plans by
    turns, batch by batch, so that a change of the machine's speed affects all plans alike."""

    def run(rows: int, tokens: int) -> None:
        _forward(tasks, _ids(rows, tokens), torch.ones(rows, tokens, dtype=torch.long, device="cpu"))

    examples = {tasks[name].id.method: name for name in reversed(names)}
    longest = min(_LONGEST, tasks.model.config.max_position_embeddings, round(_MEAN + 4 * _SIGMA) + 1)
    costs = batching.measure_costs(
        tasks, run, examples, rows=sorted({1, 4, _SIZE}), tokens=sorted({1, longest}), repeat=1
    )
    random = np.random.default_rng(0)
    lengths = random.normal(_MEAN, _SIGMA, count).astype(int).clip(1, longest)
    chosen = [names[task] for task in random.integers(len(names[:_TASKS]), size=count)]
    requests = [
        batching.Request(task=task, method=tasks[task].id.method, input_ids=_ids(1, int(length))[0])
        for task, length in zip(chosen, lengths, strict=True)
    ]
    plans: dict[str, Callable[[Sequence[batching.Request], batching.Costs], batching.Batches]] = {
        "fixed size": lambda requests, costs: batching.fixed(requests, size=_SIZE),
        "coordinated": batching.coordinated,
    }
    planned = {name: plan(requests, costs) for name, plan in plans.items()}
    seconds = dict.fromkeys(plans, 0.0)
    turns = sorted((n / len(batches), name, n) for name, batches in planned.items() for n in range(len(batches)))
    for done, name, n in turns:
        progress(f"coordinated batching, {done:.0%}")
        requested = planned[name][n]
        start = time.perf_counter()
        with tasks.batch([request.task for request in requested]):
            _forward(tasks, *batching.padded(requested))
        seconds[name] += time.perf_counter() - start
    for name, batches in planned.items():
        yield _row(
            "coordinated batching",
            name,
            tasks=min(len(names), _TASKS),
            rows=count,
            tokens=round(_MEAN),
            batches=len(batches),
            wall_s=seconds[name],
            gain=seconds["fixed size"] / seconds[name],
        )


@torch.inference_mode()
def _forward(tasks: Tasks, ids: Tensor, mask: Tensor | None = None) -> None:
    tasks.model(input_ids=ids, attention_mask=mask)


def _ids(rows: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + tokens)
    return torch.randint(1, 500, (rows, tokens), generator=generator, dtype=torch.long, device="cpu")
