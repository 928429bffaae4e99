"""How a provider has been doing: a circuit breaker, and what its answers cost. No sockets, no clock: times are told.

The breaker opens with a failure. The provider is then left alone for a while that doubles with every failure in a row,
give or take half of it, so that tenants who lost it together do not come back together. Whoever keeps the clock greets
it when that time is over; if it answers, one request is its trial, and with an answer to that it is up again.

Cost is measured by real requests: seconds per exchange where little travels, seconds per byte where much does.

A provider may be slow on purpose, whenever it likes, so others are the measure of what it may take. While others are up
it is waited for by their cost if that is less than its own; who was waited for in vain is left alone for many times as
long, whatever it answered in between; and one that others are preferred to is measured again once its dearest answer of
late is a hundredth of the time since.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

FEW_BYTES: Final = 1 << 16
"""Up to here it is the round trip that an exchange costs, and the bytes hardly count."""
_WEIGHT = 0.2  # of a new measurement
_ENOUGH = 3  # measurements to know a provider by
_PATIENCE = 8.0  # times what an answer should take
_UNKNOWN_S_PER_BYTE = 1e-6
_LONGEST_GRUDGE_S = 600.0
_random = secrets.SystemRandom().random


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What a session puts up with, all but one in seconds.

    Args:
        first_pause_s: how long a provider that fails is left alone at first.
        last_pause_s: and at most.
        least_patience_s: how long an answer may take, however quick they used to be, while there is somebody else.
        unknown_s: what an exchange is taken to cost where none was measured.
        stale_s: how long a measurement is believed: measuring again may cost one request in so long.
        stale_times: or for so many times what measuring took.
        grudge_times: who was waited for in vain while others were up is left alone for so many times as long, ten
            minutes at most.
    """

    first_pause_s: float = 0.25
    last_pause_s: float = 30.0
    least_patience_s: float = 2.0
    unknown_s: float = 1.0
    stale_s: float = 10.0
    stale_times: float = 100.0
    grudge_times: float = 20.0


USUAL: Final = Tolerance()


class State(StrEnum):
    """Of a breaker."""

    UP = "up"
    DOWN = "down"
    TRIAL = "trial"


class Health:
    """See the module's text. Not thread-safe.

    Args:
        tolerance: of the session.
        jitter: a number in [0, 1), another one each time.
    """

    def __init__(self, tolerance: Tolerance = USUAL, *, jitter: Callable[[], float] = _random) -> None:
        self.state = State.UP
        self.retry_at = 0.0
        self.down_since = 0.0
        self.failures = 0
        self._latency, self._per_byte = _Average(), _Average()
        self._tolerance, self._jitter = tolerance, jitter
        self._failures_in_a_row = 0
        self._measured_at: float | None = None
        self._dearest_s = 0.0

    def failed(self, now: float, *, wasted_s: float = 0.0) -> bool:
        """A request was lost, late or refused. Whether that opened the breaker.

        Args:
            wasted_s: for how long it was waited for that others could have been asked.
        """
        self.failures += 1
        grudge_until = now + min(self._tolerance.grudge_times * wasted_s, _LONGEST_GRUDGE_S)
        if self.state is State.DOWN and now < self.retry_at:
            self.retry_at = max(self.retry_at, grudge_until)
            return False  # asked before, or together with the one that opened it
        opened = self.state is State.UP
        if opened:
            self.down_since = now
        pause = min(self._tolerance.first_pause_s * 2**self._failures_in_a_row, self._tolerance.last_pause_s)
        self.state, self.retry_at = State.DOWN, max(now + pause * (0.5 + self._jitter()), grudge_until)
        self._failures_in_a_row = min(self._failures_in_a_row + 1, 32)
        return opened

    def greeted(self) -> None:
        """It has answered a greeting: the next request is its trial."""
        if self.state is State.DOWN:
            self.state = State.TRIAL

    def answered(self, now: float, *, seconds: float, size: int) -> bool:
        """An exchange of `size` bytes, both ways together, took so long. Whether that closed the breaker."""
        if self._measured_at is not None and self._is_long_ago(now):
            self._latency.count = self._per_byte.count = 0  # it may be quite another line by now
        self._dearest_s = max(seconds, (1 - _WEIGHT) * self._dearest_s)
        closed = self.state is not State.UP
        self.state, self._failures_in_a_row, self._measured_at = State.UP, 0, now
        if size <= FEW_BYTES:
            self._latency.add(seconds)
        else:
            self._per_byte.add(max(0.0, seconds - (self.latency_s or 0.0)) / size)
        return closed

    @property
    def latency_s(self) -> float | None:
        """Seconds of an exchange where little travels; None if there was none."""
        return self._latency.value

    @property
    def s_per_byte(self) -> float | None:
        """Seconds per byte beyond that where much does; None if there was none."""
        return self._per_byte.value

    @property
    def measurements(self) -> int:
        """How many its cost is known from."""
        return self._latency.count + self._per_byte.count

    def seconds_for(self, size: int) -> float | None:
        """What an exchange of so many bytes is likely to take; None if nothing is known."""
        if self.latency_s is None and self.s_per_byte is None:
            return None
        return (self.latency_s or 0.0) + size * (self.s_per_byte or 0.0)

    def expected_s(self, size: int) -> float:
        """The same, or what it is taken to be where nothing is known."""
        expected = self.seconds_for(size)
        if expected is None or self.s_per_byte is None:
            expected = (expected or self._tolerance.unknown_s) + size * _UNKNOWN_S_PER_BYTE
        return expected

    def patience_s(self, size: int, *, others_s: float | None) -> float:
        """How long to wait for an answer while there is somebody else to ask.

        Args:
            size: of the exchange, in bytes.
            others_s: what others that are up take for it, who then are the measure; None if nobody else is. Then it is
                longer after every failure in a row: if all are slow, one of them gets the time that it needs.
        """
        expected, times = self.expected_s(size), 2**self._failures_in_a_row
        if others_s is not None:
            expected, times = min(expected, others_s), 1
        return float(max(self._tolerance.least_patience_s, _PATIENCE * expected) * times)

    def is_stale(self, now: float) -> bool:
        """Whether its cost should be measured again."""
        if self._measured_at is None or self.measurements < _ENOUGH:
            return True
        return self._is_long_ago(now)

    def _is_long_ago(self, now: float) -> bool:
        assert self._measured_at is not None
        believed_s = max(self._tolerance.stale_s, self._tolerance.stale_times * self._dearest_s)
        return now - self._measured_at > believed_s


class _Average:
    """Of late. The first value, which may be what a cold start takes, is forgotten with the second."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        weight = max(_WEIGHT, 1 / max(1, self.count - 1))
        self.value = value if self.value is None else self.value + weight * (value - self.value)
