"""What the policies are for: throughput and latency of many tenants, rehearsed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from provider.scheduler.policy import Policy
from tests.provider.scheduler.playing import POLICIES
from tests.provider.scheduler.rehearsal import Outcome, Tenant, rehearse

ONE_ROW = (1,) * 8
BATCHES = (2, 4, 8, 16, 32, 64, 128, 256)
TRAINING = (2, 16, 64, 256)


def all_of(generating: Sequence[int], training: Sequence[int]) -> list[Tenant]:
    tenants = [Tenant(f"generating-{i}", rows) for i, rows in enumerate(generating)]
    return tenants + [Tenant(f"training-{i}", rows, trains=True) for i, rows in enumerate(training)]


@pytest.mark.parametrize(
    ("generating", "training"),
    [(ONE_ROW, TRAINING), (BATCHES, TRAINING), (BATCHES, ()), ((2, 16, 64, 256, 2, 16), (2, 16))],
)
def test_company_makes_more_tokens_and_each_of_them_faster(generating: Sequence[int], training: Sequence[int]) -> None:
    """Whether those who generate have one row each or batches of 2 to 256, beside training or alone."""
    found: dict[str, Outcome] = {}
    for name in POLICIES:
        tenants = all_of(generating, training)
        found[name] = rehearse(Policy(name=name), tenants, seconds=40)
        assert all(tenant.turns for tenant in tenants), "somebody starves"
    company = found["opportunistic"]
    for other in (found["none"], found["lockstep"]):
        assert company.latency < other.latency
        assert company.tokens_per_s > other.tokens_per_s


def test_those_who_generate_hardly_notice_those_who_train() -> None:
    alone = rehearse(Policy(), all_of(ONE_ROW[:6], ()))
    beside = rehearse(Policy(), all_of(ONE_ROW[:6], (2, 16)))
    assert beside.latency < 1.25 * alone.latency


def test_a_tenant_alone_gets_the_same_from_every_policy() -> None:
    """It waits for nobody: nobody else can come."""
    found = {rehearse(Policy(name=name), all_of((1,), ())).latency for name in POLICIES}
    assert len(found) == 1


def test_sixteen_share_what_one_pays_for() -> None:
    one, sixteen = (rehearse(Policy(), all_of((1,) * count, ())).tokens_per_s for count in (1, 16))
    assert sixteen > 4 * one


@pytest.mark.parametrize("layers", [1, 8])
def test_tenants_meet_and_stay_together(layers: int) -> None:
    """Also in a model of many layer groups, where they would hardly ever meet by chance, and though they are held up on
    the way: two crowds take turns, and nobody is left behind.
    """
    tenants = [Tenant(f"generating-{i}", 1, layers=layers) for i in range(16)]
    outcome = rehearse(Policy(), tenants, seconds=20, held_up=0.1)
    assert outcome.company > 5
    assert outcome.idle < 0.05
    slowest = max(max(tenant.turns) for tenant in tenants)
    assert slowest < 2.5 * outcome.latency
