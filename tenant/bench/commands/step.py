"""`bench step` and `bench token`: a fine-tuning step and a generated token, whole and split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from tenant.bench.commands.options import (
    HALF_THE_CORES,
    Batch,
    Inner,
    Json,
    Layers,
    PoolMemory,
    Repeat,
    Threads,
    Tokens,
    Width,
    llama,
    scheme,
)
from tenant.bench.commands.showing import finish, measuring

if TYPE_CHECKING:  # imports torch: not for --help
    from tenant.bench.contest import Contest, Shape

_ALL_MASKINGS = "none,pad,local"

Maskings = Annotated[str, typer.Option("--masking", help="Schemes to measure, separated by commas.")]


def step(
    *,
    width: Width = 2048,
    layers: Layers = 4,
    inner: Inner = 5632,
    batch: Batch = 4,
    tokens: Tokens = 128,
    masking: Maskings = _ALL_MASKINGS,
    repeat: Repeat = 3,
    threads: Threads = HALF_THE_CORES,
    pool_memory_mib: PoolMemory = 1024,
    json: Json = None,
) -> None:
    """A LoRA step (q and v) of a Llama, whole and split: CPU seconds and peak memory of every process."""
    from tenant.bench.step import measure_step
    from tenant.bench.worker import Step

    names, shape, task = _schemes(masking), llama(width, layers, inner), Step(batch=batch, tokens=tokens)
    with _running(shape, names, threads=threads, pool_memory_mib=pool_memory_mib) as (running, tell):
        rows = measure_step(running, shape, task, names, repeat=repeat, on_turn=tell)
    finish("step", rows, json)


def token(
    *,
    width: Width = 2048,
    layers: Layers = 4,
    inner: Inner = 5632,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens before the first that is measured.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Generated tokens per turn.")] = 16,
    masking: Maskings = _ALL_MASKINGS,
    repeat: Repeat = 3,
    threads: Threads = HALF_THE_CORES,
    pool_memory_mib: PoolMemory = 1024,
    json: Json = None,
) -> None:
    """A generated token of a Llama, whole and split."""
    from tenant.bench.step import measure_token
    from tenant.bench.worker import Generate

    names, shape, task = _schemes(masking), llama(width, layers, inner), Generate(prompt=prompt, tokens=tokens)
    with _running(shape, names, threads=threads, pool_memory_mib=pool_memory_mib) as (running, tell):
        rows = measure_token(running, shape, task, names, repeat=repeat, on_turn=tell)
    finish("token", rows, json)


@contextmanager
def _running(
    shape: Shape, names: Sequence[str], *, threads: int, pool_memory_mib: int
) -> Iterator[tuple[Contest, Callable[[str], None]]]:
    from tenant.bench.contest import contest

    with (
        measuring() as (folder, tell),
        contest(folder, shape, names, threads=threads, pool_memory_mib=pool_memory_mib) as running,
    ):
        yield running, tell


def _schemes(text: str) -> list[str]:
    return [scheme(name.strip()) for name in text.split(",")]
