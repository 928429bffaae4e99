"""Circuit breakers and costs, decision by decision: no sockets, and a clock that the test sets."""

import pytest
from hypothesis import given, strategies as st

from tenant.routing.known_provider import ProviderHealth, State


def steady(jitter: float = 0.5) -> ProviderHealth:
    return ProviderHealth(jitter=lambda: jitter)


def test_every_failure_in_a_row_is_followed_by_a_longer_pause() -> None:
    health, now, pauses = steady(), 0.0, []
    for _ in range(12):
        health.failed(now)
        pauses.append(health.retry_at - now)
        now = health.retry_at
    assert pauses[:4] == pytest.approx([0.25, 0.5, 1.0, 2.0])
    assert pauses == sorted(pauses)
    assert pauses[-1] == 30.0


def test_failures_of_requests_that_were_lost_together_count_once() -> None:
    health = steady()
    assert health.failed(100.0)
    pause = health.retry_at
    assert not any(health.failed(100.0 + i / 1000) for i in range(8))
    assert health.retry_at == pause


@given(jitter=st.floats(0, 1, exclude_max=True))
def test_pauses_are_jittered_by_half(jitter: float) -> None:
    health = steady(jitter)
    health.failed(0.0)
    assert 0.125 <= health.retry_at <= 0.375


def test_a_breaker_closes_with_the_answer_to_its_trial() -> None:
    health = steady()
    health.failed(0.0)
    assert health.state is State.DOWN
    health.connected()
    assert str(health.state) == "trial"
    assert not health.failed(5.0)  # it was never up
    assert health.retry_at == 5.5
    health.connected()
    assert health.answered(6.0, seconds=0.1, size=10)
    assert str(health.state) == "up"
    assert health.failed(7.0)
    assert health.retry_at == 7.25  # as at the start


def test_a_probe_changes_nothing_for_a_provider_that_is_up() -> None:
    health = steady()
    health.connected()
    assert health.state is State.UP


@given(latency=st.floats(1e-4, 1.0), rate=st.floats(1e-9, 1e-6))
def test_cost_is_latency_and_bytes(latency: float, rate: float) -> None:
    health, large = steady(), 1 << 24
    for now in range(8):
        health.answered(float(now), seconds=latency, size=1000)
        health.answered(float(now), seconds=latency + large * rate, size=large)
    assert health.seconds_for(100) == pytest.approx(latency + 100 * rate, rel=1e-2)
    assert health.seconds_for(large // 2) == pytest.approx(latency + large // 2 * rate, rel=1e-2)


def test_the_first_slow_measurement_is_dropped() -> None:
    health = steady()
    for now, seconds in enumerate((3.0, 0.01, 0.01)):
        health.answered(float(now), seconds=seconds, size=100)
    assert health.latency_s == pytest.approx(0.01)


def test_patience_follows_measurements_and_grows_without_other_providers() -> None:
    health = steady()
    assert health.patience_s(100, others_s=None) >= 2.0
    assert health.patience_s(1 << 26, others_s=60.0) > 60.0  # a slow connection may take this long for 64 MiB
    for now in range(3):
        health.answered(float(now), seconds=1.0, size=100)
    known = health.patience_s(100, others_s=None)
    assert known >= 8.0
    health.failed(3.0)
    assert health.patience_s(100, others_s=None) == pytest.approx(2 * known)
    assert health.patience_s(100, others_s=1.0) == 8.0
    assert health.patience_s(100, others_s=10.0) == pytest.approx(known)
    assert steady().patience_s(0, others_s=1e-3) >= 2.0


@given(sizes=st.lists(st.integers(0, 1 << 24), min_size=1, max_size=30))
def test_a_provider_that_becomes_slower_does_not_increase_its_own_patience(sizes: list[int]) -> None:
    """A provider chooses its own cost, so the cost of other providers is the measure."""
    health = steady()
    for now, size in enumerate(sizes):
        patience = health.patience_s(size, others_s=0.3)
        assert patience <= max(2.0, 8 * 0.3)
        health.answered(float(now), seconds=0.99 * patience, size=size)


def test_a_wait_without_an_answer_brings_a_penalty_of_many_times_its_length() -> None:
    health = steady()
    for now in (0.0, 1000.0):
        health.failed(now, wasted_s=2.0)
        assert health.retry_at == now + 40.0
        health.connected()
        health.answered(now + 50.0, seconds=0.001, size=10)  # it makes no difference to the next pause
    health.failed(2000.0)
    assert health.retry_at == 2000.25
    health.failed(2000.1, wasted_s=2.0)  # another request that was lost at the same time
    assert health.retry_at == pytest.approx(2040.1)
    health.failed(3000.0, wasted_s=100.0)
    assert health.retry_at == 3600.0


def test_cost_is_measured_again_after_a_while_and_rarely_for_slow_providers() -> None:
    quick, slow = steady(), steady()
    assert quick.is_stale(0.0)
    for now in range(3):
        quick.answered(float(now), seconds=0.001, size=100)
        slow.answered(float(now), seconds=1.0, size=100)
    assert not quick.is_stale(11.9)
    assert quick.is_stale(12.1)
    assert not slow.is_stale(90.0)
    assert slow.is_stale(103.0)
    slow.answered(200.0, seconds=2.0, size=100)
    for _ in range(2):
        slow.answered(200.0, seconds=0.001, size=100)
    assert not slow.is_stale(300.0)  # the most expensive recent answer counts, not the average
    assert slow.is_stale(400.0)
