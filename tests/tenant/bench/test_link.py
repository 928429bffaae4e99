"""Emulated links: bandwidth and delay. (`test_bench_commands.py` sends bytes over one.)"""

import math

from hypothesis import given, strategies as st

from tenant.bench.link import Condition, DelayLine

PETALS = (
    Condition(mbit_per_s=1000, round_trip_ms=5),
    Condition(mbit_per_s=100, round_trip_ms=5),
    Condition(mbit_per_s=100, round_trip_ms=100),
)
"""The conditions of PETALS' table; its "< 5 ms" are 5."""


def test_conditions_have_a_readable_form() -> None:
    assert Condition.parse("1gbit/5ms") == PETALS[0]
    assert Condition.parse(" 100mbit/100ms ") == PETALS[2]
    assert Condition.parse("2.5mbit/0ms") == Condition(mbit_per_s=2.5)
    assert [str(c) for c in PETALS] == ["1 Gbit/s, 5 ms", "100 Mbit/s, 5 ms", "100 Mbit/s, 100 ms"]


@given(
    rate=st.sampled_from([math.inf, 0.1, 100.0, 1000.0]),
    delay=st.floats(0, 500),
    sent=st.lists(st.tuples(st.floats(0, 2), st.integers(0, 1 << 20)), min_size=1, max_size=30),
)
def test_a_direction_has_its_bandwidth_and_delay(rate: float, delay: float, sent: list[tuple[float, int]]) -> None:
    condition = Condition(mbit_per_s=rate, round_trip_ms=delay)
    direction, now, before = DelayLine(condition), 0.0, 0.0
    busy, size, free = 0.0, 0, 0.0  # the start of an uninterrupted transmission, its bytes, its end
    for pause, count in sent:
        now += pause
        if free <= now:
            busy, size = now, 0
        size += count
        arrival = direction.arrival(now, count)
        assert arrival >= before  # in order
        assert math.isclose(arrival, busy + size / (rate * 125_000) + delay / 2000, abs_tol=1e-6)
        before, free = arrival, arrival - delay / 2000
