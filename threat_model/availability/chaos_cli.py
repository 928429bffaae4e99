"""`bench chaos`: providers are killed while a tenant works."""

from __future__ import annotations

from typing import Annotated

import typer

from symbiosis_priv.errors import ProtocolError
from tenant.bench.commands.options import Json
from tenant.bench.commands.showing import finish, measuring


def chaos(
    *,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps, at least.")] = 200,
    kills: Annotated[int, typer.Option(min=0, help="It trains on until so many were killed.")] = 10,
    generations: Annotated[int, typer.Option(min=0, help="Texts that are generated afterwards.")] = 10,
    executors: Annotated[int, typer.Option(min=1, help="Processes that multiply.")] = 3,
    helpers: Annotated[int, typer.Option(min=1, help="Processes that make effects of pads.")] = 2,
    pad_helpers: Annotated[int, typer.Option(min=1, help="Helpers that share a pad; the others are spares.")] = 1,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two kills, on average.")] = 3.0,
    merciless: Annotated[
        bool, typer.Option("--merciless", help="Kill also the last one of a role, and wait until it is back.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of who is killed when.")] = 0,
    json: Json = None,
) -> None:
    """SIGKILL random providers while a tenant trains and generates; status 1 if one bit comes out differently."""
    from threat_model.availability.chaos import Work, chaos_rows, run_chaos

    work = Work(steps=steps, generations=generations, kills=kills)
    with measuring() as (folder, tell):
        found = run_chaos(
            folder,
            work,
            executors=executors,
            helpers=helpers,
            pad_helpers=pad_helpers,
            every_s=every,
            merciless=merciless,
            seed=seed,
            on_event=tell,
        )
    finish("chaos", chaos_rows(found, every_s=every), json)
    if not found.identical:
        raise ProtocolError("the disturbed run has ended with other bits than the undisturbed one")
