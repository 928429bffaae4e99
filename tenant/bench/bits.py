"""`bench bits`: a tenant gets the same bits whoever asks beside it, however batched and however the model is sharded.

One provider after the other, of one model: every policy, every number of ranks, every way to share products out. At
each of them tenants in processes of their own ask first one by one and then all at once (`load`). Every answer of the
second kind is compared with the one that its tenant got alone, and those that it got alone with what it got alone at
the first provider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tenant.bench.report import Row
from tenant.bench.tenants import Figures, Mix, Scenario, Variant, measure_tenants

_MIX = Mix(generating_rows=(1, 3, 8), training_rows=(2, 17, 64), ranks=(8,))
_HIDDEN, _LAYERS = 64, 1


def measure_bits(
    directory: Path,
    *,
    scenarios: Sequence[Scenario],
    variants: Sequence[Variant],
    seconds: float,
    on_result: Callable[[Row], None],
) -> None:
    """Start one provider after the other and compare what tenants get there.

    Args:
        directory: new or empty.
        scenarios: who asks at once.
        variants: of providers.
        seconds: for which everybody asks; before, as long again, every answer is compared in full, then a row of it.
        on_result: told every line as soon as it is there.

    Raises:
        ProtocolError: a tenant could not go on.
    """
    first: dict[str, str] = {}

    def done(figures: Figures) -> None:
        for tenant, answers in figures.alone.items():
            first.setdefault(tenant, answers)
        others = sum(first[tenant] != answers for tenant, answers in figures.alone.items())
        on_result(
            {
                "policy": figures.variant.policy,
                "ranks": figures.variant.ranks,
                "sharding": figures.variant.sharding if figures.variant.ranks > 1 else None,
                "tenants": figures.generating + figures.training,
                "answers": figures.answers,
                "wrong": figures.wrong,
                "tenants_with_other_answers_alone": others,
            }
        )

    for variant in variants:
        folder = directory / str(variant)
        folder.mkdir()
        measure_tenants(
            folder,
            scenarios=scenarios,
            mixes=[_MIX],
            variants=[variant],
            hidden=_HIDDEN,
            layers=_LAYERS,
            seconds=seconds,
            threads=1,
            on_result=done,
        )
