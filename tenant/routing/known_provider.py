"""A provider as a session knows it: its circuit breaker, the cost of its answers, what it serves, and what was asked
of it. Callers pass the time; the module uses no socket and no clock.

A failure opens the breaker. The provider then gets no requests during a pause, which doubles with every failure in a
row and is varied at random by up to a half, so that tenants do not return together. After the pause the caller connects
again. If that succeeds, the provider gets one request as a trial, whose answer closes the breaker. Cost is measured by
real requests: seconds per exchange for small exchanges, seconds per byte for large ones.

A provider may be slow on purpose at any time, so the cost of other providers limits the wait for it. After a wait
without an answer, the provider gets a penalty: a pause of many times the wasted time, even if it answers probes
meanwhile. A provider that is slower than others is measured again after a hundred times the duration of its slowest
recent answer.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from symbiosis_priv.federation import Peer
from symbiosis_priv.limits import GroupIndex, Role
from symbiosis_priv.network import wire
from symbiosis_priv.network.dial import Traffic
from symbiosis_priv.system.pacing import Backoff

FEW_BYTES: Final = 1 << 16
"""Largest size in bytes of a small exchange, whose duration is that of a round trip."""
_WEIGHT = 0.2  # weight of a new measurement in the average
_ENOUGH = 3  # number of measurements after which the cost counts as known
_PATIENCE = 8.0  # the session waits this many times the expected time
_UNKNOWN_S_PER_BYTE = 1e-6
_LONGEST_PENALTY_S = 600.0
_random = secrets.SystemRandom().random


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How long a session waits for providers."""

    first_pause_s: float = 0.25  # after a provider's first failure; it doubles with every failure, up to `last_pause_s`
    last_pause_s: float = 30.0
    least_patience_s: float = 2.0  # shortest wait for an answer while another provider is available
    unknown_s: float = 1.0  # assumed cost of an exchange if none was measured
    stale_s: float = 10.0  # for which a measurement is used at least, so measuring costs a request per `stale_s`
    stale_times: float = 100.0  # the same, as a multiple of the measured duration
    penalty_times: float = 20.0  # pause of a provider that did not answer while others did, per second of waiting


USUAL: Final = Tolerance()


class State(StrEnum):
    UP = "up"
    DOWN = "down"
    TRIAL = "trial"


class ProviderHealth:
    """The health of one provider. Not thread-safe. `jitter` returns random numbers in [0, 1)."""

    def __init__(self, tolerance: Tolerance = USUAL, *, jitter: Callable[[], float] = _random) -> None:
        self.state = State.UP
        self.retry_at = 0.0
        self.failures = 0
        self.down_since = 0.0
        self._latency, self._per_byte = _Average(), _Average()
        self._tolerance = tolerance
        self._backoff = Backoff(tolerance.first_pause_s, tolerance.last_pause_s, jitter=0.5, random=jitter)
        self._measured_at = -math.inf
        self._slowest_s = 0.0

    def failed(self, now: float, *, wasted_s: float = 0.0) -> bool:
        """Record that a request was lost, late or refused. Returns True if that opened the breaker. `wasted_s`: seconds
        of waiting during which other providers could have been asked."""
        self.failures += 1
        penalty_until = now + min(self._tolerance.penalty_times * wasted_s, _LONGEST_PENALTY_S)
        if self.state is State.DOWN and now < self.retry_at:
            self.retry_at = max(self.retry_at, penalty_until)
            return False  # the request was sent before the breaker opened
        opened = self.state is State.UP
        if opened:
            self.down_since = now
        self.state, self.retry_at = State.DOWN, max(now + self._backoff.failed(), penalty_until)
        return opened

    def connected(self) -> None:
        """Record that the provider has answered a probe. Its next request is the trial."""
        if self.state is State.DOWN:
            self.state = State.TRIAL

    def answered(self, now: float, *, seconds: float, size: int) -> bool:
        """Record the duration of an exchange of `size` bytes in all. Returns True if that closed the breaker."""
        if self._is_long_ago(now):
            self._latency.count = self._per_byte.count = 0  # the connection's properties may have changed completely
        self._slowest_s = max(seconds, (1 - _WEIGHT) * self._slowest_s)
        closed = self.state is not State.UP
        self.state, self._measured_at = State.UP, now
        if closed:
            self._backoff.succeeded()
        if size <= FEW_BYTES:
            self._latency.add(seconds)
        else:
            self._per_byte.add(max(0.0, seconds - (self._latency.value or 0.0)) / size)
        return closed

    @property
    def latency_s(self) -> float | None:
        """Average seconds of small exchanges; None without a measurement."""
        return self._latency.value

    @property
    def measurements(self) -> int:
        return self._latency.count + self._per_byte.count

    def seconds_for(self, size: int) -> float | None:
        """Expected seconds of an exchange of `size` bytes; None without a measurement."""
        if self._latency.value is None and self._per_byte.value is None:
            return None
        return (self._latency.value or 0.0) + size * (self._per_byte.value or 0.0)

    def expected_s(self, size: int) -> float:
        """Expected seconds of an exchange of `size` bytes; `Tolerance.unknown_s` without a measurement."""
        expected = self.seconds_for(size)
        if expected is None or self._per_byte.value is None:
            expected = (expected or self._tolerance.unknown_s) + size * _UNKNOWN_S_PER_BYTE
        return expected

    def patience_s(self, size: int, *, others_s: float | None) -> float:
        """Return the seconds to wait for an exchange of `size` bytes while another provider can be asked. `others_s`:
        expected seconds of other providers that are up, which limit the wait. None if no other provider is up; the
        limit then grows with every failure in a row, so that a slow provider can finish."""
        expected, times = self.expected_s(size), 2 ** min(self._backoff.failures, 32)
        if others_s is not None:
            expected, times = min(expected, others_s), 1
        return float(max(self._tolerance.least_patience_s, _PATIENCE * expected) * times)

    def is_stale(self, now: float) -> bool:
        """Returns True if another measurement is due."""
        return self.measurements < _ENOUGH or self._is_long_ago(now)

    def _is_long_ago(self, now: float) -> bool:
        valid_s = max(self._tolerance.stale_s, self._tolerance.stale_times * self._slowest_s)
        return now - self._measured_at > valid_s


class _Average:
    """A moving average. The second value replaces the first, which may include a cold start."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        weight = max(_WEIGHT, 1 / max(1, self.count - 1))
        self.value = value if self.value is None else self.value + weight * (value - self.value)


@dataclass(frozen=True, kw_only=True)
class ProviderFigures:
    """Figures of one provider in a session. `state`: in a word or two. `latency_s`: of small requests, smoothed; None
    before the first answer. `verified`, `rejected`: its answers that passed the check, and that failed it. `waited_s`:
    for how long requests have waited in vain for its answer, and `left_s`: in how many seconds the last of them gives
    up; None if none has waited for two seconds."""

    name: str
    role: Role
    operator: str
    address: str
    state: str
    requests: int
    latency_s: float | None
    verified: int
    rejected: int
    bytes_sent: int = 0
    bytes_received: int = 0
    waited_s: float | None = None
    left_s: float | None = None


class KnownProvider:
    """A provider in one role, as the tenant pinned it, with the session's knowledge of it. `welcome`: the layers and
    limits that it last stated; None before its first answer. `routes.Routes` guards the fields that change."""

    def __init__(self, peer: Peer, tolerance: Tolerance = USUAL) -> None:
        self.peer = peer
        self.health = ProviderHealth(tolerance)
        self.welcome: wire.Welcome | None = None
        self.in_flight = 0
        self.requests = self.verified = self.rejected = 0

    @property
    def is_open(self) -> bool:
        return self.health.state is State.UP or (self.health.state is State.TRIAL and not self.in_flight)

    @property
    def is_up(self) -> bool:
        """Returns True if the provider has answered, and has not failed since."""
        return self.welcome is not None and self.health.state is State.UP

    def serves(self, index: GroupIndex) -> bool:
        """Returns True if the provider has announced this layer group."""
        welcome = self.welcome
        return welcome is not None and welcome.first_group <= index < welcome.end_group

    def cost(self, size: int) -> float:
        """Expected seconds of an exchange of `size` bytes after the requests in flight; 0 without a measurement."""
        return (self.health.seconds_for(size) or 0.0) * (1 + self.in_flight)

    def figures(self, *, quarantined: bool, wait: tuple[float, float] | None, traffic: Traffic) -> ProviderFigures:
        """Return the figures. `wait`: `waited_s` and `left_s`, if requests wait; `traffic`: of its connections."""
        state = "no answer yet" if self.welcome is None else str(self.health.state)
        waited_s, left_s = wait or (None, None)
        if wait and state == "up":
            state = "not answering"
        return ProviderFigures(
            name=self.peer.name,
            role=self.peer.role,
            operator=self.peer.operator,
            address=self.peer.where,
            state="quarantined" if quarantined else state,
            requests=self.requests,
            latency_s=self.health.latency_s,
            verified=self.verified,
            rejected=self.rejected,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            waited_s=waited_s,
            left_s=left_s,
        )

    def __str__(self) -> str:
        return f"{self.peer.role} {self.peer.name!r}"
