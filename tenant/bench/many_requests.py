"""`bench endpoint`: many requests, answered together by the endpoint's engine and one after another by `generate()`.

All requests are submitted at the same time, so the time to the first token includes the queue. With a random model,
they use eight adapters (none, LoRA, IA3, OFT and an adapter of PetS). With a checkpoint, they use none, and plain
transformers answer them too. Prompts are random tokens, and all answers have one length.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer
from peft import IA3Config, LoraConfig, OFTConfig, PeftConfig
from torch import Tensor

from symbiosis_priv.checkpoints.checkpoint import resolve
from tenant.bench.measured_models import Effort, Llama, MaskingVariant, counters, provide, remote_config, write_adapters
from tenant.bench.options import Masking, Progress, benchmark
from tenant.bench.report import Goal, Row, figure, percentile, where
from tenant.endpoint.engine.continuous import ContinuousEngine
from tenant.endpoint.engine.queued import Engine
from tenant.endpoint.engine.requests import Done, EngineRequest, Event, Failed, Token
from tenant.endpoint.engine.single_model import open_packed
from tenant.model.hf import backend_of
from tenant.model.ledger import since
from tenant.model.loading import load_language_model, load_model, load_tokenizer
from tenant.tasks import Tasks
from tenant.tasks.methods import BottleneckConfig

_ANSWER_S = 3600.0
_ATTENTION = ["q_proj", "v_proj"]
_ADAPTERS: Final[dict[str, PeftConfig]] = {
    "lora-1": LoraConfig(r=8, target_modules="all-linear"),
    "lora-2": LoraConfig(r=8, target_modules="all-linear"),
    "lora-3": LoraConfig(r=16, target_modules=_ATTENTION),
    "ia3-1": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "ia3-2": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": OFTConfig(oft_block_size=32, target_modules=_ATTENTION),
    "bottleneck": BottleneckConfig(bottleneck_dim=16, target_modules=["o_proj", "down_proj"]),
}

Way = Callable[[list[EngineRequest]], list[list[float]]]
"""A function that answers requests. Returns the times of the tokens of each answer."""

_SHAPE, _ONCE = Llama(width=2048, layers=4, inner=5632), Effort(repeat=1)


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in where(rows, variant="all together"):
        what = f"tokens a second of {row['streams']} answers together over one after another"
        yield Goal(what, figure(row, "over_one_after_another"), at_least=4)


@benchmark("endpoint", goals=goals)
def endpoint(
    folder: Path,
    progress: Progress,
    *,
    shape: Llama = _SHAPE,
    model: Annotated[
        str | None, typer.Option(help="A checkpoint, compared with plain transformers; a random Llama if left out.")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 32,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Generated tokens of each answer.")] = 32,
    masking: Masking = "pad",
    effort: Effort = _ONCE,
) -> Iterator[Row]:
    """Answer many requests together with the endpoint's engine, and one after another with `generate()`."""
    variant = MaskingVariant.parse(masking)
    path = shape.save(folder / "model") if model is None else resolve(model)
    tokenizer: Any = NoText() if model is None else load_tokenizer(path)
    if model is None:
        progress("writing adapters")
        write_adapters(folder / "adapters", load_model(path, dtype=torch.float32), _ADAPTERS)
    progress("starting providers")
    with provide(path, folder, threads=effort.threads, maskings=[variant]) as local:
        split = load_language_model(path, remote=remote_config(local, variant), dtype=torch.float32)
        tasks = Tasks(split)
        loaded = tasks.register_all(folder / "adapters") if model is None else []
        names = [None, *loaded]
        ways: dict[str, Callable[[], Way]] = {
            "one after another": lambda: partial(_generate, split, batch=1, tasks=tasks),
            "all together": lambda: partial(_answered, ContinuousEngine(open_packed(split, tasks), tokenizer)),
        }
        if model is not None:
            whole = load_language_model(path, dtype=torch.float32)
            ways["whole model, one after another"] = lambda: partial(_generate, whole, batch=1)
            ways["whole model, one batch"] = lambda: partial(_generate, whole, batch=streams)
        found = {way: _Figures() for way in ways}
        for turn in range(effort.repeat + 1):
            random = np.random.default_rng(turn)
            prompts = random.integers(1, split.config.vocab_size, size=(streams if turn else 1, prompt)).tolist()
            requests = [
                EngineRequest(id=str(i), prompt=tuple(ids), adapter=names[i % len(names)], max_tokens=tokens)
                for i, ids in enumerate(prompts)
            ]
            for way, open_way in ways.items():
                progress(f"{way}, {f'turn {turn}' if turn else 'warming up'}")
                torch.set_num_threads((os.cpu_count() or 1) if way.startswith("whole") else effort.threads)
                run, before, began = open_way(), counters(split), time.perf_counter()
                answers = run(requests)
                if turn:
                    round_trips = since(before, counters(split)).executor_round_trips
                    found[way].add(answers, began=began, round_trips=round_trips)
        backend_of(split).close()
    slow = found["one after another"].per_s
    for way, figures in found.items():
        yield {
            "variant": way,
            "streams": streams,
            "prompt": prompt,
            "tokens": tokens,
            "tokens_per_s": figures.per_s,
            "over_one_after_another": figures.per_s / slow,
            "first_token_p50_s": percentile(figures.first, 50),
            "first_token_p99_s": percentile(figures.first, 99),
            "token_p50_ms": percentile(figures.between, 50, unit=1e-3),
            "token_p99_ms": percentile(figures.between, 99, unit=1e-3),
            "round_trips": figures.round_trips // effort.repeat,
        }


class _Figures:
    """Times of tokens, added up over turns."""

    def __init__(self) -> None:
        self.first, self.between = list[float](), list[float]()
        self._seconds, self.round_trips = 0.0, 0

    def add(self, answers: list[list[float]], *, began: float, round_trips: int) -> None:
        self._seconds += max(times[-1] for times in answers) - began
        self.round_trips += round_trips
        for times in answers:
            self.first.append(times[0] - began)
            self.between += np.diff(times).tolist()

    @property
    def per_s(self) -> float:
        return (len(self.first) + len(self.between)) / self._seconds


class NoText:
    """Replaces a tokenizer, because decoding to text is not measured."""

    def decode(self, *_: object, **__: object) -> str:
        return ""


def answer(engine: Engine, requests: list[EngineRequest]) -> list[list[float]]:
    """Submit all requests together, and wait for all answers. Returns the times of the tokens."""
    times: dict[str, list[float]] = {request.id: [] for request in requests}
    ended: SimpleQueue[Done | Failed] = SimpleQueue()

    def take(event: Event, *, of: str) -> None:
        if isinstance(event, Token):
            times[of].append(time.perf_counter())
        elif isinstance(event, Done | Failed):
            ended.put(event)

    for request in requests:
        engine.submit(request, partial(take, of=request.id))
    for _ in requests:
        last = ended.get(timeout=_ANSWER_S)
        if isinstance(last, Failed):
            raise last.error
    return list(times.values())


def _answered(engine: Engine, requests: list[EngineRequest]) -> list[list[float]]:
    with contextlib.closing(engine):
        return answer(engine, requests)


def _generate(
    model: Any, requests: list[EngineRequest], *, batch: int, tasks: Tasks | None = None
) -> list[list[float]]:
    """Answer with `generate()`, in batches of this size. The requests of a batch have one adapter."""
    times = []
    for start in range(0, len(requests), batch):
        together = requests[start : start + batch]
        ids = torch.tensor([request.prompt for request in together], dtype=torch.long, device="cpu")
        clock, adapter = list[float](), together[0].adapter

        def tick(ids: Tensor, _: Tensor, clock: list[float] = clock) -> Tensor:
            """Called after each token."""
            clock.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device="cpu")

        with contextlib.nullcontext() if tasks is None or adapter is None else tasks.batch([adapter]):
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=together[0].max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[tick],
            )
        times += [clock] * len(together)
    return times
