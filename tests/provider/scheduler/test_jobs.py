"""The prediction of product times, which determines the size of slices."""

from collections import Counter

import pytest

from provider.scheduler.jobs import Job, Key
from provider.scheduler.scheduler import Scheduler
from tests.provider.scheduler.playing import RATE, ROW_WORK, job, scheduler, separate

KEY = Key(0, "forward", "ring")


def test_slices_follow_the_measured_times() -> None:
    subject = scheduler()
    big = job(rows=1000)
    for _ in range(20):  # a fast machine
        subject.pace.record(KEY, rows=100, work=100 * ROW_WORK, seconds=100 * ROW_WORK / (RATE * 8))
    before = subject.pace.rows(big)
    for _ in range(20):  # the additional time of a single row does not count for many rows
        subject.pace.record(KEY, rows=1, work=ROW_WORK, seconds=1.0)
    assert subject.pace.rows(big) >= before // 8
    subject.pace.record(KEY, rows=100, work=100 * ROW_WORK, seconds=100.0)  # one outlier
    assert subject.pace.rows(big) >= 1


def test_rows_are_multiplied_while_weights_are_read() -> None:
    """A product takes the longer of both times, not their sum: a few more rows cost nothing."""
    subject = scheduler()
    for _ in range(20):
        subject.pace.record(KEY, rows=1, work=ROW_WORK, seconds=1e-3)
        subject.pace.record(KEY, rows=100, work=100 * ROW_WORK, seconds=20e-3)
    assert subject.pace.seconds(job(), 4) == pytest.approx(1e-3)
    assert subject.pace.seconds(job(), 100) == pytest.approx(20e-3, rel=0.01)


def with_experts() -> Scheduler[Job]:
    """A scheduler that has learned that reading one expert takes as long as the arithmetic of 16 rows."""
    subject = scheduler(slice_s=800 * ROW_WORK / RATE)
    key = Key(0, "forward", "ring", by_expert=True)
    for _ in range(60):
        subject.pace.record(key, rows=4, work=4 * ROW_WORK, seconds=4 * 16 * ROW_WORK / RATE, matrices=4)
        subject.pace.record(key, rows=800, work=800 * ROW_WORK, seconds=800 * ROW_WORK / RATE, matrices=1)
    return subject


def test_a_product_for_many_experts_reads_the_weights_of_all() -> None:
    pace = with_experts().pace
    spread, together = job(rows=128, matrices=128), job(rows=128, matrices=1)
    assert pace.seconds(together, 128) == pytest.approx(128 * ROW_WORK / RATE, rel=0.01)
    assert pace.seconds(spread, 128) == pytest.approx(128 * 16 * ROW_WORK / RATE, rel=0.01)
    assert pace.rows(together) == pytest.approx(800, abs=8)
    assert pace.rows(spread) == pytest.approx(50, abs=1)


@pytest.mark.parametrize("alone", [False, True])
def test_one_row_for_each_expert_costs_more_than_as_many_rows_for_one(alone: bool) -> None:
    """A tenant whose rows go to all experts takes the executor's time for all their weights."""
    subject = separate(with_experts()) if alone else with_experts()
    served: Counter[object] = Counter()
    subject.put(job("spread", rows=10**6, matrices=10**6, stage="fine_tuning"))
    subject.put(job("together", rows=10**6, matrices=1, stage="fine_tuning", group=1))
    for _ in range(320):
        for piece in subject.take(1.0):
            served[piece.job.tenant] += piece.rows
    assert served["together"] / served["spread"] == pytest.approx(16, rel=0.2)


def test_rows_for_many_experts_do_not_join_a_product_for_one() -> None:
    """Each of them would read the weights of one more expert, beyond the slice that the leader's rows fill."""
    subject = with_experts()
    subject.put(job("together", rows=750, matrices=1))
    subject.put(job("spread", rows=40, matrices=40))
    assert [(p.job.tenant, p.rows) for p in subject.take(1.0)] == [("together", 750)]
    subject = with_experts()
    subject.put(job("spread", rows=8, matrices=8))
    subject.put(job("together", rows=20, matrices=1))
    assert sum(piece.rows for piece in subject.take(1.0)) == 28
