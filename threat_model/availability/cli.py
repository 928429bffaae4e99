"""The commands `bench abuse`, `bench chaos` and `bench ranks`. A command imports its measurement when it runs."""

from typing import Annotated

import typer

from symbiosis_priv.errors import ProtocolError
from tenant.bench.cli_options import (
    HALF_THE_CORES,
    Inner,
    Json,
    Layers,
    Masking,
    Seconds,
    Threads,
    Width,
    llama,
    measure,
    numbers,
    refuse_wrong,
    scheme,
)


def abuse(
    *,
    hidden: Annotated[int, typer.Option(min=8, help="Width of the synthetic model, a multiple of 8.")] = 2048,
    seconds: Seconds = 4.0,
    visits: Annotated[int, typer.Option(min=1, help="Connections of the abuser that connects and leaves.")] = 1000,
    threads: Threads = HALF_THE_CORES,
    json: Json = None,
) -> None:
    """Measure an honest tenant's requests alone, and while others flood, read slowly, reconnect, or are revoked."""
    from threat_model.availability.abuse import measure_abuse

    rows = measure(
        "abuse",
        json,
        lambda folder, tell: measure_abuse(folder, hidden=hidden, seconds=seconds, visits=visits, threads=threads),
    )
    refuse_wrong(rows, "wrong")


def chaos(
    *,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps, at least.")] = 200,
    kills: Annotated[
        int, typer.Option(min=0, help="Continue training until this number of providers was killed.")
    ] = 10,
    generations: Annotated[int, typer.Option(min=0, help="Texts to generate afterwards.")] = 10,
    executors: Annotated[int, typer.Option(min=1, help="Number of executors.")] = 3,
    helpers: Annotated[int, typer.Option(min=1, help="Number of helpers.")] = 2,
    pad_helpers: Annotated[int, typer.Option(min=1, help="Helpers that share a pad; the others are spares.")] = 1,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two kills, on average.")] = 3.0,
    merciless: Annotated[
        bool, typer.Option("--merciless", help="Kill also the last provider of a role, and wait until it is back.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the choice of providers and times.")] = 0,
    json: Json = None,
) -> None:
    """Kill random providers (SIGKILL) while a tenant trains and generates. Status 1 if one bit differs."""
    from threat_model.availability.chaos import Work, run_chaos

    found = measure(
        "chaos",
        json,
        lambda folder, tell: run_chaos(
            folder,
            Work(steps=steps, generations=generations, kills=kills),
            executors=executors,
            helpers=helpers,
            pad_helpers=pad_helpers,
            every_s=every,
            merciless=merciless,
            seed=seed,
            on_event=tell,
        ).rows(every_s=every),
    )
    if found[0]["bits"] != "identical":
        raise ProtocolError("the disturbed run has ended with other bits than the undisturbed one")


def ranks(
    *,
    width: Width = 512,
    layers: Layers = 1,
    inner: Inner = 1408,
    groups: Annotated[str, typer.Option(help="Numbers of executors, separated by commas.")] = "1,2",
    ranks: Annotated[int, typer.Option(min=2, help="Processes of each executor.")] = 2,
    tenants: Annotated[int, typer.Option(min=1, help="Tenants that send requests at once.")] = 2,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each request.")] = 1,
    masking: Masking = "pad",
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds before each loss and after each restart.")] = 3.0,
    apart: Annotated[
        bool,
        typer.Option(
            "--apart/--together",
            help="Let a group that starts again leave the cores to another group, as if each had its own machine.",
        ),
    ] = True,
    json: Json = None,
) -> None:
    """Kill and stop ranks of a sharded executor while tenants send requests, with one group and with two groups.

    Status 1 if one bit of the results differs, or if the log does not name the lost rank.
    """
    from threat_model.availability.ranks import measure_ranks

    shape, counts, name = llama(width, layers, inner), numbers(groups, "--groups"), scheme(masking)
    found = measure(
        "ranks",
        json,
        lambda folder, tell: measure_ranks(
            folder,
            shape,
            groups=counts,
            ranks=ranks,
            tenants=tenants,
            rows=rows,
            masking=name,
            seconds=seconds,
            apart=apart,
            on_event=tell,
        ),
    )
    refuse_wrong(found, "wrong")
    if unnamed := [str(row["lost"]) for row in found if row["named"] != "yes"]:
        raise ProtocolError(f"the log does not say which rank was lost: {', '.join(unnamed)}")
