"""The commands `bench abuse`, `bench chaos` and `bench ranks`. A command imports its measurement when it runs."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from symbiosis_priv.errors import ProtocolError
from tenant.bench.cli_options import (
    HALF_THE_CORES,
    Json,
    Progress,
    Seconds,
    Threads,
    measure,
    numbers,
    refuse_wrong,
    scheme,
)
from tenant.bench.measured_models import Llama
from tenant.bench.results.result_file import Row
from tenant.cli.options import takes
from threat_model.availability.options import Killing, Sharding, TenantWork

_WORK, _KILLING, _SHARDING = TenantWork(), Killing(), Sharding()
_SHAPE = Llama(width=512, layers=1, inner=1408)


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
        lambda folder, progress: measure_abuse(folder, hidden=hidden, seconds=seconds, visits=visits, threads=threads),
    )
    refuse_wrong(rows, "wrong")


@takes
def chaos(*, work: TenantWork = _WORK, killing: Killing = _KILLING, json: Json = None) -> None:
    """Kill random providers (SIGKILL) while a tenant trains and generates. Status 1 if one bit differs."""
    from threat_model.availability.chaos import run_chaos

    def run(folder: Path, progress: Progress) -> Iterable[Row]:
        found = run_chaos(folder, work, killing, on_event=progress)
        return found.rows(generations=work.generations, every_s=killing.every)

    found = measure("chaos", json, run)
    if found[0]["bits"] != "identical":
        raise ProtocolError("the disturbed run has ended with other bits than the undisturbed one")


@takes
def ranks(
    *,
    shape: Llama = _SHAPE,
    groups: Annotated[str, typer.Option(help="Numbers of executors, separated by commas.")] = "1,2",
    sharding: Sharding = _SHARDING,
    json: Json = None,
) -> None:
    """Kill and stop ranks of a sharded executor while tenants send requests, with one group and with two groups.

    Status 1 if one bit of the results differs, or if the log does not name the lost rank.
    """
    from threat_model.availability.ranks import measure_ranks

    counts = numbers(groups, "--groups")
    scheme(sharding.masking)
    found = measure(
        "ranks", json, lambda folder, progress: measure_ranks(folder, shape, sharding, groups=counts, on_event=progress)
    )
    refuse_wrong(found, "wrong")
    if unnamed := [str(row["lost"]) for row in found if row["named"] != "yes"]:
        raise ProtocolError(f"the log does not say which rank was lost: {', '.join(unnamed)}")
