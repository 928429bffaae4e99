"""Fair shares of tenants and of stages, by their weights."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from provider.config.schema import PolicyName
from provider.scheduler.jobs import Key
from tests.provider.scheduler.playing import POLICIES, SLICE_ROWS, job, scheduler


@given(
    st.lists(st.sampled_from((1, 2, 8, 30, 200)), min_size=2, max_size=4),
    st.sampled_from(POLICIES),
    st.lists(st.sampled_from((0.5, 1.0, 3.0)), min_size=4, max_size=4),
)
def test_tenants_with_work_waiting_get_equal_shares(sizes: list[int], name: PolicyName, weights: list[float]) -> None:
    """Tenants get equal numbers of rows per weight, within one slice, whatever their request sizes and connections."""
    subject = scheduler(name)
    served: Counter[object] = Counter()
    if name == "lockstep":  # the order is by layer group; within a group, by arrival
        weights = [1.0] * 4

    def ask(tenant: int) -> None:  # separate groups, so that no tenant joins another one's product
        subject.put(job(str(tenant), rows=sizes[tenant], group=tenant, stage="fine_tuning", weight=weights[tenant]))

    for tenant in range(len(sizes)):
        for _ in range(tenant + 1):
            ask(tenant)
    for _ in range(300):
        pieces = subject.take(1.0)
        for piece in pieces:
            served[piece.job.tenant] += piece.rows
            if piece.last:
                ask(int(str(piece.job.tenant)))
        if name != "lockstep":
            shares = [served[str(t)] / weights[t] for t in range(len(sizes))]
            assert max(shares) - min(shares) <= 2 * SLICE_ROWS / min(weights)
    assert sum(served.values())


def test_an_idle_tenant_accrues_no_credit() -> None:
    subject = scheduler("none")
    subject.put(job("busy", rows=800, stage="fine_tuning"))
    for _ in range(90):
        subject.take(1.0)
    subject.put(job("new", rows=800, group=1, stage="fine_tuning"))
    turns = [subject.take(1.0)[0].job.tenant for _ in range(20)]
    assert 9 <= turns.count("new") <= 11


def test_inference_has_priority_and_does_not_starve_fine_tuning() -> None:
    """Both stages have more work than the executor can do; shares follow the weights."""
    subject = scheduler("none", inference_weight=4.0)
    served: Counter[str] = Counter()
    subject.put(job("trainer", rows=10_000, stage="fine_tuning"))
    for _ in range(200):
        while subject.waiting()["inference"] < 3:
            subject.put(job("chat", rows=4, group=1))
        for piece in subject.take(1.0):
            served[piece.job.stage] += piece.rows
    assert served["inference"] / served["fine_tuning"] == pytest.approx(4, rel=0.2)


def test_one_row_of_inference_overtakes_waiting_fine_tuning() -> None:
    subject = scheduler()
    for tenant in "abc":
        subject.put(job(tenant, rows=1000, stage="fine_tuning"))
    for _ in range(10):
        subject.take(1.0)
    subject.put(job("chat", rows=1, group=5, arrival=1.0))
    assert subject.take(1.0)[0].job.tenant == "chat"


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("name", ["opportunistic", "none"])
def test_requests_for_a_narrow_layer_group_are_not_free(name: PolicyName, rows: int) -> None:
    """A product of a narrow group takes its fixed time, a hundred times longer per multiply-add than a wide group's. It
    made the wide products of other tenants look slow: an honest tenant got a hundredth of the executor."""
    subject, now = scheduler(name), 0.0
    narrow = replace(job("mallory", rows=rows, group=0), row_work=2048, row_cost=2048)
    wide = replace(job("alice", group=1), row_work=1 << 24, row_cost=1 << 24)
    subject.pace.record(Key(2, "forward", "ring"), rows=1, work=1 << 24, seconds=3.4e-3)  # of an earlier tenant
    waiting, seconds = Counter[str](), {"alice": 0.0, "mallory": 0.0}
    while now < 1.0:
        for like, most in ((narrow, 2), (wide, 1)):
            tenant = str(like.tenant)
            for _ in range(most - waiting[tenant]):
                subject.put(replace(like, arrival=now))
                waiting[tenant] += 1
        if not (pieces := subject.take(now)):
            now = max(now + 1e-5, subject.next_deadline(now) or now)
            continue
        leader = pieces[0].job
        took = 60e-6 + 0.2e-9 * leader.row_work + sum(piece.rows for piece in pieces) * leader.row_work / 50e9
        now += took
        seconds[str(leader.tenant)] += took
        waiting.subtract(str(piece.job.tenant) for piece in pieces if piece.last)
        subject.done(pieces, now=now, seconds=took)
    assert seconds["alice"] > 0.4 * sum(seconds.values())
