"""`bench ranks`: a rank of a sharded executor is lost while tenants ask."""

from __future__ import annotations

from typing import Annotated

import typer

from symbiosis_priv.errors import ProtocolError
from tenant.bench.commands.options import Inner, Json, Layers, Width, llama, numbers, scheme
from tenant.bench.commands.showing import finish, measuring


def ranks(
    *,
    width: Width = 512,
    layers: Layers = 1,
    inner: Inner = 1408,
    groups: Annotated[str, typer.Option(help="Executors that there are, separated by commas.")] = "1,2",
    ranks: Annotated[int, typer.Option(min=2, help="Processes of each.")] = 2,
    tenants: Annotated[int, typer.Option(min=1, help="That ask at once.")] = 2,
    rows: Annotated[int, typer.Option(min=1, help="Of each of their products.")] = 1,
    masking: Annotated[str, typer.Option(help="The scheme.")] = "pad",
    seconds: Annotated[float, typer.Option(min=0.1, help="Before each loss and after each return.")] = 3.0,
    apart: Annotated[
        bool,
        typer.Option(
            "--apart/--together",
            help="Let a group start again with little priority where there is another, as if each had a machine.",
        ),
    ] = True,
    json: Json = None,
) -> None:
    """Kill a rank of a sharded executor, and stop one, while tenants ask: with that group alone and with a second one.

    Status 1 if one bit comes out differently, or the log does not say which rank was lost.
    """
    from threat_model.availability.ranks import measure_ranks

    with measuring() as (folder, tell):
        found = measure_ranks(
            folder,
            llama(width, layers, inner),
            groups=numbers(groups, "--groups"),
            ranks=ranks,
            tenants=tenants,
            rows=rows,
            masking=scheme(masking),
            seconds=seconds,
            apart=apart,
            on_event=tell,
        )
    finish("ranks", found, json)
    if wrong := sum(int(row["wrong"] or 0) for row in found):
        raise ProtocolError(f"{wrong} answers were not the tenant's own product")
    if unnamed := [str(row["lost"]) for row in found if row["named"] != "yes"]:
        raise ProtocolError(f"the log does not say which rank it was: {', '.join(unnamed)}")
