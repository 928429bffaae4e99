"""`bench linear`: one masked, verified linear."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tenant.bench.commands.options import HALF_THE_CORES, Json, Repeat, Rows, Threads, multiple_of_64, numbers, scheme
from tenant.bench.commands.showing import finish, measuring

if TYPE_CHECKING:  # imports torch: not for --help
    from tenant.bench.report import Row


def linear(
    *,
    rows: Rows = "1,16,64,256",
    width: Annotated[str, typer.Option(help="Widths of the layer, separated by commas; multiples of 64.")] = "768,2048",
    masking: Annotated[str, typer.Option(help="The scheme.")] = "pad",
    repeat: Repeat = 50,
    threads: Threads = HALF_THE_CORES,
    json: Json = None,
) -> None:
    """One masked, verified linear and its parts, beside a bare TLS echo of the same bytes and the bare product.

    Pads are drawn before the clock runs; "back to back" is a call that finds what was drawn during the last one.
    """
    from tenant.bench.linear import measure_linears

    counts, widths = numbers(rows, "--rows"), [multiple_of_64(size, "--width") for size in numbers(width, "--width")]
    results: list[Row] = []
    with measuring() as (folder, tell):

        def done(row: Row) -> None:
            results.append(row)
            tell(f"measured {row['rows']} rows of width {row['width']}")

        for size in widths:
            measure_linears(
                folder / str(size),
                width=size,
                row_counts=counts,
                masking=scheme(masking),
                repeat=repeat,
                threads=threads,
                on_result=done,
            )
    finish("linear", results, json)
