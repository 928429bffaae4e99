"""`bench provider`: many tenants ask one provider."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from symbiosis_priv.errors import ConfigError, ProtocolError
from symbiosis_priv.system.files import output_file
from tenant.bench.commands.options import HALF_THE_CORES, Json, Threads, numbers
from tenant.bench.commands.showing import finish, measuring

POLICIES = ("none", "lockstep", "opportunistic")
SHARDINGS = "columns,gathered"


def provider(
    *,
    tenants: Annotated[
        str, typer.Option(help="How many at once, generating+training, separated by commas.")
    ] = "1+0,16+0,6+0,6+2,8+4",
    generating_rows: Annotated[
        str,
        typer.Option(
            help="Rows of generating tenants' requests, by turns; with slashes, one mix after the other: "
            "1/2,4,8,16,32,64,128,256 for one row each, then for batches."
        ),
    ] = "1",
    training_rows: Annotated[str, typer.Option(help="Rows of training tenants' requests, by turns.")] = "2,16,64,256",
    adapters: Annotated[str, typer.Option(help="Ranks of the tenants' adapters, by turns.")] = "8,64",
    policies: Annotated[str, typer.Option(help="Batching policies, separated by commas.")] = ",".join(POLICIES),
    ranks: Annotated[str, typer.Option(help="Processes that hold the model together, separated by commas.")] = "1",
    shardings: Annotated[str, typer.Option(help="How they share products out, separated by commas.")] = SHARDINGS,
    hidden: Annotated[int, typer.Option(min=8, help="Width of the synthetic model, a multiple of 8.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the synthetic model.")] = 1,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement.")] = 8.0,
    threads: Threads = HALF_THE_CORES,
    json: Json = None,
    picture: Annotated[
        Path | None, typer.Option(callback=output_file, help="Also draw tokens per second and latency, as SVG.")
    ] = None,
) -> None:
    """Let many tenants ask one provider, with each batching policy by turns; answers are compared bit by bit."""
    from tenant.bench.picture import draw
    from tenant.bench.tenants import Figures, Mix, Scenario, measure_tenants, tenants_row, variants

    if hidden % 8:
        raise ConfigError("--hidden: a Llama's width is a multiple of 8 here")
    kinds = list(
        variants(
            policies=chosen(policies, POLICIES, "--policies"),
            ranks=numbers(ranks, "--ranks"),
            shardings=chosen(shardings, SHARDINGS.split(","), "--shardings"),
        )
    )
    mixes = [
        Mix(
            generating_rows=tuple(numbers(rows, "--generating-rows")),
            training_rows=tuple(numbers(training_rows, "--training-rows")),
            ranks=tuple(numbers(adapters, "--adapters")),
        )
        for rows in generating_rows.split("/")
    ]
    scenarios = [Scenario(generating=some, training=others) for some, others in pairs(tenants, "--tenants")]
    results: list[Figures] = []
    with measuring() as (folder, tell):

        def done(figures: Figures) -> None:
            results.append(figures)
            tell(f"measured {figures.variant} with {figures.generating} + {figures.training} tenants")

        measure_tenants(
            folder,
            scenarios=scenarios,
            mixes=mixes,
            variants=kinds,
            hidden=hidden,
            layers=layers,
            seconds=seconds,
            threads=threads,
            on_result=done,
        )
    finish("provider", [tenants_row(figures) for figures in results], json)
    if picture is not None:
        draw(results, picture)
    if wrong := sum(figures.wrong for figures in results):
        raise ProtocolError(f"{wrong} answers were not the bits that their tenant got alone")


def chosen(text: str, known: Sequence[str], option: str) -> list[str]:
    """Names separated by commas, all of them known."""
    names = [name.strip() for name in text.split(",")]
    if unknown := set(names) - set(known):
        raise ConfigError(f"{option}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    return names


def pairs(text: str, option: str) -> list[tuple[int, int]]:
    """Like `6+2` separated by commas."""
    found = [re.fullmatch(r"(\d+)\+(\d+)", part.strip()) for part in text.split(",")]
    counts = [(int(match[1]), int(match[2])) for match in found if match is not None]
    if len(counts) < len(found) or not all(map(sum, counts)):
        raise ConfigError(f"{option} {text!r}: write GENERATING+TRAINING separated by commas, like 1+0,6+2")
    return counts
