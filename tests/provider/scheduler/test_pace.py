"""What slices are cut by."""

from __future__ import annotations

from provider.scheduler.jobs import Key
from tests.provider.scheduler.playing import RATE, ROW_WORK, job, scheduler


def test_slices_follow_the_pace() -> None:
    key: Key = (0, "forward", "ring")
    subject = scheduler()
    big = job(rows=1000)
    for _ in range(20):  # a fast machine
        subject.pace.record(key, rows=100, work=100 * ROW_WORK, seconds=100 * ROW_WORK / (RATE * 8))
    before = subject.pace.rows(big)
    for _ in range(20):  # what a single row takes longer for is not said of many
        subject.pace.record(key, rows=1, work=ROW_WORK, seconds=1.0)
    assert subject.pace.rows(big) >= before // 8
    subject.pace.record(key, rows=100, work=100 * ROW_WORK, seconds=100.0)  # one hiccup
    assert subject.pace.rows(big) >= 1


def test_a_pace_that_has_collapsed_recovers() -> None:
    """A machine that was busy for a while: slices stay large enough to notice when it is not any more."""
    key: Key = (0, "forward", "ring")
    subject = scheduler()
    big = job(rows=1000)
    for seconds in [1e3] * 40 + [1e-9] * 60:
        rows = subject.pace.rows(big)
        subject.pace.record(key, rows=rows, work=rows * ROW_WORK, seconds=rows * seconds)
    assert subject.pace.rows(big) > 1000
