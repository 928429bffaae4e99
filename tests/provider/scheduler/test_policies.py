"""Throughput and latency of many tenants under each policy, simulated."""

from collections.abc import Sequence

import pytest

from provider.config.schema import SchedulerConfig
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
def test_batching_increases_throughput_and_reduces_latency(generating: Sequence[int], training: Sequence[int]) -> None:
    """Tenants have one row each or batches of 2 to 256, and some may train."""
    found: dict[str, Outcome] = {}
    for name in POLICIES:
        tenants = all_of(generating, training)
        found[name] = rehearse(SchedulerConfig(policy=name), tenants, seconds=40)
        assert all(tenant.turns for tenant in tenants), "somebody starves"
    batched = found["opportunistic"]
    for other in (found["none"], found["lockstep"]):
        assert batched.latency < other.latency
        assert batched.tokens_per_s > other.tokens_per_s


def test_training_tenants_hardly_delay_generating_ones() -> None:
    alone = rehearse(SchedulerConfig(), all_of(ONE_ROW[:6], ()))
    beside = rehearse(SchedulerConfig(), all_of(ONE_ROW[:6], (2, 16)))
    assert beside.latency < 1.25 * alone.latency


def test_a_single_tenant_is_served_equally_by_every_policy() -> None:
    """A single tenant never waits, because no other tenant can come."""
    found = {rehearse(SchedulerConfig(policy=name), all_of((1,), ())).latency for name in POLICIES}
    assert len(found) == 1


def test_sixteen_tenants_share_the_reading_of_the_weights() -> None:
    one, sixteen = (rehearse(SchedulerConfig(), all_of((1,) * count, ())).tokens_per_s for count in (1, 16))
    assert sixteen > 4 * one


@pytest.mark.parametrize("layers", [1, 8])
def test_tenants_meet_and_stay_together(layers: int) -> None:
    """Two groups of tenants take turns, and no tenant is left behind, even with delays, and in a model of many layer
    groups, where tenants would rarely meet by chance."""
    tenants = [Tenant(f"generating-{i}", 1, layers=layers) for i in range(16)]
    outcome = rehearse(SchedulerConfig(), tenants, seconds=20, held_up=0.1)
    assert outcome.batch_requests > 5
    assert outcome.idle < 0.05
    slowest = max(max(tenant.turns) for tenant in tenants)
    assert slowest < 2.5 * outcome.latency
