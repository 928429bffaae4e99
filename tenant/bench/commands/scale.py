"""`bench scale`: how the cost of a step grows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tenant.bench.commands.options import (
    HALF_THE_CORES,
    Json,
    PoolMemory,
    Repeat,
    Rows,
    Threads,
    multiple_of_64,
    numbers,
    scheme,
)
from tenant.bench.commands.showing import finish, measuring


def scale(
    *,
    rows: Rows = "64,128,256,512",
    width: Annotated[str, typer.Option(help="Widths, separated by commas; multiples of 64.")] = "512,1024,2048",
    layers: Annotated[str, typer.Option(help="Layers, separated by commas.")] = "1,2,4",
    masking: Annotated[str, typer.Option(help="The scheme.")] = "pad",
    repeat: Repeat = 3,
    threads: Threads = HALF_THE_CORES,
    pool_memory_mib: PoolMemory = 1024,
    svg: Annotated[Path | None, typer.Option(help="Also draw a picture per axis into this folder.")] = None,
    json: Json = None,
) -> None:
    """The tenant's cost of a step against rows, width and depth, with slopes in a log-log picture.

    The first of each list stays while another one grows.
    """
    from symbiosis_priv.system.files import output_file, write_atomically
    from tenant.bench.scale import AXES, measure_scale, picture

    widths = [multiple_of_64(size, "--width") for size in numbers(width, "--width")]
    row_counts, depths = numbers(rows, "--rows"), numbers(layers, "--layers")
    pictures = {axis: file for axis in AXES if svg and (file := output_file(svg / f"scale-{axis}.svg"))}
    with measuring() as (folder, tell):
        results = measure_scale(
            folder,
            rows=row_counts,
            widths=widths,
            depths=depths,
            masking=scheme(masking),
            repeat=repeat,
            threads=threads,
            pool_memory_mib=pool_memory_mib,
            on_turn=tell,
        )
    finish("scale", results, json)
    for axis, file in pictures.items():
        write_atomically(file, picture(results, axis).encode())
