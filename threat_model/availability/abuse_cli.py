"""`bench abuse`: an honest tenant beside those who misuse its provider."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from symbiosis_priv.errors import ProtocolError
from tenant.bench.commands.options import HALF_THE_CORES, Json, Threads
from tenant.bench.commands.showing import finish, measuring

if TYPE_CHECKING:  # imports torch: not for --help
    from tenant.bench.report import Row


def abuse(
    *,
    hidden: Annotated[int, typer.Option(min=8, help="Width of the synthetic model, a multiple of 8.")] = 2048,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement.")] = 4.0,
    threads: Threads = HALF_THE_CORES,
    json: Json = None,
) -> None:
    """An honest tenant's requests alone and while others flood, read slowly, come and go, or are turned away."""
    from threat_model.availability.abuse import measure_abuse

    results: list[Row] = []
    with measuring() as (folder, tell):

        def done(row: Row) -> None:
            results.append(row)
            tell(f"measured {row['abuse']}")

        measure_abuse(folder, hidden=hidden, seconds=seconds, threads=threads, on_result=done)
    finish("abuse", results, json)
    if wrong := sum(int(row["wrong"] or 0) for row in results):
        raise ProtocolError(f"{wrong} answers were not the bits that the tenant got alone")
