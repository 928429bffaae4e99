"""`bench tasks`: many tasks of several PEFT methods over one model of DistilBERT's size with random weights, as in the
PetS paper (its table 5 has 4,344 tasks).

The memory of all tasks is compared with that of a full copy per task; a batch of rows of many tasks with one task after
the other and with batches of one task, whole and split; and coordinated batching with the best of its parts.
"""

import contextlib
import gc
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import psutil
import torch
import typer
from peft import IA3Config, LoraConfig, OFTConfig, PeftConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from tenant.bench.measured_models import Bert, Effort, MaskingVariant, counters, provide, remote_config, write_adapters
from tenant.bench.options import Progress, benchmark
from tenant.bench.processes import seconds_of
from tenant.bench.report import Goal, Row, Value, figure, where
from tenant.model.hf import backend_of
from tenant.model.ledger import since
from tenant.model.loading import load_model
from tenant.tasks import coordinated as batching
from tenant.tasks.adapter import CONFIG, TENSORS
from tenant.tasks.methods import BitFitConfig
from tenant.tasks.registry import Tasks

_LONGEST, _TASKS = 128, 128  # longest request in tokens, and number of tasks in the queue, as in the paper's traffic
_MIB = 1 << 20
_METHODS: Final[dict[str, PeftConfig]] = {
    "LORA": LoraConfig(r=8, target_modules=["query", "value"]),
    "IA3": IA3Config(target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]),
    "OFT": OFTConfig(oft_block_size=32, target_modules=["query", "value"]),
    "BITFIT": BitFitConfig(target_modules=["query", "value"]),
}

_MEAN, _SIGMA, _SIZE = 32.0, 8.0, 32  # tokens of a queued request, as in the PetS paper; requests of a fixed batch
_ROWS, _TOKENS = 32, 8  # of a mixed batch, each row of another task
_DISTILBERT, _EFFORT = Bert(layers=6), Effort()


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    by_turns = "of one task after the other over a mixed batch's"
    for measurement, variant, what, least, most in (
        ("memory", "one model", "tasks in the memory of as many full copies", 26, None),
        ("batch, whole model", "mixed batch", f"time {by_turns}, whole", 2, None),
        ("batch, split model", "mixed batch", f"round trips {by_turns}", 10, None),
        ("coordinated batching", "coordinated", "time of batches of fixed size over coordinated ones'", 1.5, None),
        ("batch, whole model", "mixed batch", "time of a mixed batch over that of a batch of one task", None, 1.5),
        ("coordinated batching", "coordinated", "time of coordinated batches over that of the best part", None, 1.02),
    ):
        for row in where(rows, measurement=measurement, variant=variant):
            yield Goal(what, figure(row, "gain" if most is None else "over_best"), at_most=most, at_least=least)


@benchmark("tasks", goals=goals)
def tasks(
    folder: Path,
    progress: Progress,
    *,
    shape: Bert = _DISTILBERT,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks; PEFT methods alternate.")] = 4344,
    requests: Annotated[int, typer.Option(min=1, help="Queued requests of coordinated batching.")] = 1024,
    effort: Effort = _EFFORT,
) -> Iterator[Row]:
    """Serve many tasks over one BERT: memory, mixed batches (whole and split), coordinated batching (PetS).

    The column "gain" is the measured quantity of the first variant divided by that of this variant, and "over_best" is
    that of this variant divided by the smallest of the others. The whole model is measured while no other process
    works, with the threads of tenant and executor together."""
    path = shape.save(folder / "model")
    progress("writing tasks")
    repository = write_tasks(folder / "tasks", path, count=tasks)
    rows = min(_ROWS, tasks)
    torch.set_num_threads(2 * effort.threads)
    model = load_model(path, dtype=torch.float32, kind=AutoModel)
    serving = Tasks(model, memory_limit=1 << 40)
    names = serving.register_all(repository)
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
        remote = remote_config(local, MaskingVariant.parse("pad"))
        split = load_model(path, remote=remote, dtype=torch.float32, kind=AutoModel)
        with backend_of(split), contextlib.closing(Tasks(split)) as serving:
            serving.register_all(repository)
            # one turn, because the round trips are the same in every turn
            yield from _batch(serving, names[:rows], 1, measurement="batch, split model")


def write_tasks(repository: Path, model: Path, *, count: int) -> Path:
    """Write `count` task folders with random parameters; the methods alternate."""
    templates = {f".{name}": config for name, config in _METHODS.items()}
    write_adapters(repository, load_model(model, dtype=torch.float32, kind=AutoModel), templates)
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        template = repository / f".{list(_METHODS)[number % len(_METHODS)]}"
        folder = repository / f"task-{number:04}"
        folder.mkdir()
        (folder / CONFIG).write_bytes((template / CONFIG).read_bytes())
        tensors = load_file(template / TENSORS)
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
            tensors[name] = tensor + 0.02 * noise
        save_file(tensors, folder / TENSORS)
    return repository


def _row(measurement: str, variant: str, **figures: Value) -> Row:
    columns = ("tasks", "rows", "tokens", "batches", "variant", "memory_mib", "task_kib", "load_ms", "unload_ms")
    timed = ("wall_s", "round_trips", "gain", "over_best")
    return {"measurement": measurement, **dict.fromkeys(columns + timed), "variant": variant, **figures}


def _memory(tasks: Tasks, names: Sequence[str]) -> Iterator[Row]:
    """Measure the process's resident memory before and after loading, which includes Python objects; and, with all
    tasks loaded, the time to unload one by its name, and to load it."""
    copies = sum(parameter.nbytes for parameter in tasks.model.parameters())
    gc.collect()
    before = psutil.Process().memory_info().rss
    seconds = sum(seconds_of(partial(tasks.load, name)) for name in names)
    gc.collect()
    grown = max(tasks.bytes, psutil.Process().memory_info().rss - before)
    unloading, loading = (
        [seconds_of(partial(change, name)) for name in names[: len(_METHODS)]] for change in (tasks.unload, tasks.load)
    )
    row, whole, shared = partial(_row, "memory", tasks=len(names)), len(names) * copies, copies + grown
    yield row("a full copy per task", memory_mib=whole / _MIB, gain=1.0)
    yield row(
        "one model",
        memory_mib=shared / _MIB,
        task_kib=grown / len(names) / 1024,
        load_ms=1000 * statistics.mean(loading),
        unload_ms=1000 * statistics.mean(unloading),
        wall_s=seconds,
        gain=whole / shared,
    )


def _batch(tasks: Tasks, names: Sequence[str], repeat: int, *, measurement: str) -> Iterator[Row]:
    """Measure variants by turns: the median seconds, and the round trips to executors (None for a whole model). The
    batch of one task is the mean of one batch per method."""
    variants = {
        "one task after the other": [[name] for name in names],
        "mixed batch": [list(names)],
        "batch of one task": [[name] * len(names) for name in names[: len(_METHODS)]],
    }
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    trips = dict.fromkeys(variants, 0.0)
    for _ in range(1 + repeat):  # the first turn makes plans
        for variant, batches in variants.items():
            parts = len(batches) if variant == "batch of one task" else 1
            before = counters(tasks.model)
            seconds[variant].append(seconds_of(partial(_serve, tasks, batches)) / parts)
            trips[variant] = since(before, counters(tasks.model)).executor_round_trips // parts
    wall = {variant: statistics.median(turns[1:]) for variant, turns in seconds.items()}
    counted = trips if any(trips.values()) else wall
    for variant in variants:
        yield _row(
            measurement,
            variant,
            tasks=1 if variant == "batch of one task" else len(names),
            rows=len(names),
            tokens=_TOKENS,
            batches=len(names) if variant == "one task after the other" else 1,
            wall_s=wall[variant],
            round_trips=trips[variant] or None,
            gain=counted["one task after the other"] / counted[variant],
            over_best=wall[variant] / min(wall[other] for other in variants if other != variant),
        )


def _serve(tasks: Tasks, batches: Sequence[Sequence[str]]) -> None:
    for names in batches:
        with tasks.batch(names):
            _forward(tasks, _ids(len(names), _TOKENS))


def _coordinated(tasks: Tasks, names: Sequence[str], count: int, progress: Progress) -> Iterator[Row]:
    """Queue `count` requests, with normally distributed lengths and uniformly distributed tasks. Measure all plans by
    turns, batch by batch, so that a change of the machine's speed affects all plans alike."""

    def run(rows: int, tokens: int) -> None:
        _forward(tasks, _ids(rows, tokens), torch.ones(rows, tokens, dtype=torch.long, device="cpu"))

    def serve(requested: Sequence[batching.Request]) -> None:
        with tasks.batch([request.task for request in requested]):
            _forward(tasks, *batching.padded(requested))

    longest = min(_LONGEST, tasks.model.config.max_position_embeddings, round(_MEAN + 4 * _SIGMA) + 1)
    sizes = sorted({1, round(_MEAN), longest})
    costs = batching.measure_costs(tasks, run, names[:_TASKS], rows=(1, 8, _SIZE), tokens=sizes)
    random = np.random.default_rng(0)
    lengths = random.normal(_MEAN, _SIGMA, count).astype(int).clip(1, longest)
    chosen = [names[task] for task in random.integers(len(names[:_TASKS]), size=count)]
    requests = [
        batching.Request(task=task, method=tasks[task].method, input_ids=_ids(1, int(length))[0])
        for task, length in zip(chosen, lengths, strict=True)
    ]
    shared = replace(costs, own={method: np.zeros_like(table) for method, table in costs.own.items()})
    plans = {
        "fixed size": batching.fixed(requests, size=_SIZE),
        "by the shared cost": batching.divided(requests, shared),
        "coordinated": batching.coordinated(requests, costs),
    }
    seconds = dict.fromkeys(plans, 0.0)
    turns = sorted((n / len(batches), name, n) for name, batches in plans.items() for n in range(len(batches)))
    for done, name, n in turns:
        progress(f"coordinated batching, {done:.0%}")
        seconds[name] += seconds_of(partial(serve, plans[name][n]))
    for name, batches in plans.items():
        yield _row(
            "coordinated batching",
            name,
            tasks=min(len(names), _TASKS),
            rows=count,
            tokens=round(_MEAN),
            batches=len(batches),
            wall_s=seconds[name],
            gain=seconds["fixed size"] / seconds[name],
            over_best=seconds[name] / min(seconds[other] for other in plans if other != name),
        )


@torch.inference_mode()
def _forward(tasks: Tasks, ids: Tensor, mask: Tensor | None = None) -> None:
    tasks.model(input_ids=ids, attention_mask=mask)


def _ids(rows: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + tokens)
    return torch.randint(1, 500, (rows, tokens), generator=generator, dtype=torch.long, device="cpu")
