"""Back-off, and periodic threads."""

import threading

import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.system.pacing import Backoff, Periodic

LONG_S = 30.0


@given(st.integers(1, 80), st.floats(0.0, 1.0), st.floats(0.0, 1.0, exclude_max=True))
def test_pauses_double_up_to_the_longest_and_vary_by_their_jitter(failures: int, jitter: float, drawn: float) -> None:
    backoff = Backoff(0.5, 30.0, jitter=jitter, random=lambda: drawn)
    pauses = [backoff.failed() for _ in range(failures)]
    usual = [min(0.5 * 2**failure, 30.0) for failure in range(failures)]
    assert pauses == pytest.approx([pause * (1 + jitter * (2 * drawn - 1)) for pause in usual])
    assert backoff.failures == failures


def test_a_pause_is_over_in_time_and_a_success_begins_anew() -> None:
    now = [100.0]
    backoff = Backoff(1.0, 8.0, clock=lambda: now[0])
    assert backoff.is_over
    backoff.failed()
    backoff.failed()
    now[0] += 1.9
    assert not backoff.is_over
    now[0] += 0.1
    assert backoff.is_over
    backoff.succeeded()
    assert backoff.next_s == 1.0
    assert backoff.is_over


def test_a_periodic_thread_repeats_its_action_and_survives_its_errors(caplog: pytest.LogCaptureFixture) -> None:
    calls, done = list[int](), threading.Event()

    def act() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("once")
        if len(calls) == 3:
            done.set()

    periodic = Periodic(act, every_s=0.001, name="test", jitter=0.5)
    periodic.start()
    assert done.wait(LONG_S)
    assert periodic.close(LONG_S)
    seen = len(calls)
    assert caplog.text.count("test failed and is tried again: OSError") == 1
    assert seen == len(calls) >= 3


def test_the_first_call_can_come_at_once_and_wake_brings_the_next() -> None:
    called = threading.Semaphore(0)
    periodic = Periodic(called.release, every_s=3600.0, name="test", at_once=True)
    periodic.start()
    assert called.acquire(timeout=LONG_S)
    periodic.wake()
    assert called.acquire(timeout=LONG_S)
    assert periodic.close(LONG_S)
    assert not called.acquire(blocking=False)


def test_closing_reports_a_call_that_takes_longer(caplog: pytest.LogCaptureFixture) -> None:
    begun, release = threading.Event(), threading.Event()

    def act() -> None:
        begun.set()
        release.wait(LONG_S)
        raise ValueError("the text may quote a prompt")

    periodic = Periodic(act, every_s=0.001, name="slow", at_once=True)
    periodic.start()
    assert begun.wait(LONG_S)
    assert not periodic.close(0.01)
    release.set()
    assert periodic.close(LONG_S)
    assert "slow failed" in caplog.text
    assert "prompt" not in caplog.text
