"""Options of `bench chaos` and `bench ranks`. This module does not import torch."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from tenant.bench.cli_options import Masking


@dataclass(frozen=True, kw_only=True)
class TenantWork:
    """The tenant's work: optimizer steps of LoRA on all linears, and then greedy texts."""

    steps: Annotated[int, Option(min=1, help="Optimizer steps, at least.")] = 200
    kills: Annotated[int, Option(min=0, help="Continue training until this number of providers was killed.")] = 10
    generations: Annotated[int, Option(min=0, help="Texts to generate afterwards.")] = 10


@dataclass(frozen=True, kw_only=True)
class Killing:
    """Numbers of providers, and the schedule of kills. What a killed provider was doing depends on timing."""

    executors: Annotated[int, Option(min=1, help="Number of executors.")] = 3
    helpers: Annotated[int, Option(min=1, help="Number of helpers.")] = 2
    pad_helpers: Annotated[int, Option(min=1, help="Helpers that share a pad; the others are spares.")] = 1
    every: Annotated[float, Option(min=0.1, help="Seconds between two kills, on average.")] = 3.0
    merciless: Annotated[
        bool, Option("--merciless", help="Kill also the last provider of a role, and wait until it is back.")
    ] = False
    seed: Annotated[int, Option(help="Seed of the choice of providers and times.")] = 0


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Sharded executors, and the tenants that send requests to them.

    Args:
        pause_s: pause of a tenant between two requests, so that the restarting group gets processor time.
    """

    ranks: Annotated[int, Option(min=2, help="Processes of each executor.")] = 2
    tenants: Annotated[int, Option(min=1, help="Tenants that send requests at once.")] = 2
    rows: Annotated[int, Option(min=1, help="Rows of each request.")] = 1
    masking: Masking = "pad"
    seconds: Annotated[float, Option(min=0.1, help="Seconds before each loss and after each restart.")] = 3.0
    apart: Annotated[
        bool,
        Option(
            "--apart/--together",
            help="Let a group that starts again leave the cores to another group, as if each had its own machine.",
        ),
    ] = True
    pause_s: float = 0.0
