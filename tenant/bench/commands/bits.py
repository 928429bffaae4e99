"""`bench bits`: the same bits for every tenant, at every kind of provider."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from symbiosis_priv.errors import ProtocolError
from tenant.bench.commands.options import Json, numbers
from tenant.bench.commands.showing import finish, measuring
from tenant.bench.commands.tenants import POLICIES, SHARDINGS, chosen, pairs

if TYPE_CHECKING:  # imports torch: not for --help
    from tenant.bench.report import Row


def bits(
    *,
    tenants: Annotated[
        str, typer.Option(help="How many at once, generating+training, separated by commas.")
    ] = "1+0,6+2,48+16",
    policies: Annotated[str, typer.Option(help="Batching policies, separated by commas.")] = ",".join(POLICIES),
    ranks: Annotated[str, typer.Option(help="Processes that hold the model together, separated by commas.")] = "1,2,4",
    shardings: Annotated[str, typer.Option(help="How they share products out, separated by commas.")] = SHARDINGS,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement.")] = 1.0,
    json: Json = None,
) -> None:
    """Compare every tenant's answers in company with those that it gets alone, at one kind of provider after the other:
    policies, ranks, ways to shard. Status 1 if one bit differs."""
    from tenant.bench.bits import measure_bits
    from tenant.bench.tenants import Scenario, variants

    kinds = list(
        variants(
            policies=chosen(policies, POLICIES, "--policies"),
            ranks=numbers(ranks, "--ranks"),
            shardings=chosen(shardings, SHARDINGS.split(","), "--shardings"),
        )
    )
    scenarios = [Scenario(generating=some, training=others) for some, others in pairs(tenants, "--tenants")]
    results: list[Row] = []
    with measuring() as (folder, tell):

        def done(row: Row) -> None:
            results.append(row)
            tell(f"compared {len(results)} of {len(kinds) * len(scenarios)}")

        measure_bits(folder, scenarios=scenarios, variants=kinds, seconds=seconds, on_result=done)
    finish("bits", results, json)
    if wrong := sum(int(row["wrong"] or 0) + int(row["tenants_with_other_answers_alone"] or 0) for row in results):
        raise ProtocolError(f"{wrong} answers were not the bits that their tenant got alone")
