"""What slices are cut by."""

from __future__ import annotations

import pytest

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


def test_rows_are_multiplied_while_weights_are_read() -> None:
    """A product takes the longer of both, and not their sum: a few more rows cost nothing."""
    key: Key = (0, "forward", "ring")
    subject = scheduler()
    for _ in range(20):
        subject.pace.record(key, rows=1, work=ROW_WORK, seconds=1e-3)
        subject.pace.record(key, rows=100, work=100 * ROW_WORK, seconds=20e-3)
    assert subject.pace.seconds(job(), 4) == pytest.approx(1e-3)
    assert subject.pace.seconds(job(), 100) == pytest.approx(20e-3, rel=0.01)


def test_rows_that_waited_for_the_weights_say_little_about_arithmetic() -> None:
    key: Key = (0, "forward", "ring")
    subject = scheduler()
    for _ in range(20):
        subject.pace.record(key, rows=1, work=ROW_WORK, seconds=1e-3)
        subject.pace.record(key, rows=1000, work=1000 * ROW_WORK, seconds=20e-3)
    before = subject.pace.seconds(job(), 1000)
    for _ in range(20):
        subject.pace.record(key, rows=16, work=16 * ROW_WORK, seconds=0.99e-3)
    assert subject.pace.seconds(job(), 1000) == before
