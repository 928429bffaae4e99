"""Options that several benchmarks have in common, and how their text is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.system.files import output_file

if TYPE_CHECKING:  # imports torch: not for --help
    from tenant.bench.contest import Shape

HALF_THE_CORES = max(1, (os.cpu_count() or 1) // 2)

Rows = Annotated[str, typer.Option(help="Rows per call, separated by commas.")]
Repeat = Annotated[int, typer.Option(min=1, help="Repetitions.")]
Json = Annotated[
    Path | None, typer.Option("--json", callback=output_file, help="Also write every figure to this file.")
]
Threads = Annotated[int, typer.Option(min=1, help="Torch threads of each process.")]
Width = Annotated[int, typer.Option(min=64, help="Of the Llama; a multiple of 64.")]
Layers = Annotated[int, typer.Option(min=1, help="Of the Llama.")]
Inner = Annotated[int, typer.Option(min=8, help="Width inside of the MLP.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences of a batch.")]
Tokens = Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")]
PoolMemory = Annotated[int, typer.Option(min=0, help="Memory of each tenant for pads drawn ahead, in MiB.")]


def scheme(name: str) -> str:
    """The name of a scheme that a session can run."""
    from tenant.masking.registry import session_scheme

    return session_scheme(name).name


def llama(width: int, layers: int, inner: int) -> Shape:
    """The Llama that is measured; ConfigError for another width than a multiple of 64."""
    from tenant.bench.contest import Shape

    return Shape(width=multiple_of_64(width, "--width"), layers=layers, inner=inner)


def multiple_of_64(number: int, option: str) -> int:
    """The number, if it is one; ConfigError otherwise."""
    if number % 64:
        raise ConfigError(f"{option} {number}: write multiples of 64, the dimensions of an attention head")
    return number


def numbers(text: str, option: str) -> list[int]:
    """Positive whole numbers between commas; ConfigError for anything else."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{option} {text!r}: write whole numbers separated by commas, like 1,8,64")
    return found
