"""`bench start`: how soon a provider serves and a tenant can verify."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from tenant.bench.commands.options import Inner, Json, Layers, Repeat, Width, multiple_of_64
from tenant.bench.commands.showing import finish, measuring


def start(
    *,
    width: Width = 2048,
    layers: Layers = 16,
    inner: Inner = 8192,
    repeat: Repeat = 3,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads of a provider, and for making keys.")] = (
        os.cpu_count() or 1
    ),
    json: Json = None,
) -> None:
    """A provider's start, cold and warm, and the tenant's verification keys, beside reading the checkpoint.

    Writes a checkpoint of the given shape (a billion weights, 2 GB) and 2 bytes per weight of cache; both are deleted.
    """
    from tenant.bench.contest import Shape
    from tenant.bench.start import measure_start

    shape = Shape(width=multiple_of_64(width, "--width"), layers=layers, inner=inner)
    with measuring() as (folder, tell):
        rows = measure_start(folder, shape, threads=threads, repeat=repeat, on_turn=tell)
    finish("start", rows, json)
