"""How much a tenant may ask for: rates and rows in flight, and waiting before refusing.

A rate is a bucket of one second's worth. A request is let in while its bucket is not empty and may leave it in debt,
so that a large one passes too and the next ones wait for it; over time no more than the rate comes through. Who would
have to wait long is refused (BUSY, which is worth the same bytes again), so that nothing piles up here.

Refusals and reports cost no product, and so they have a rate of their own, the same for everybody: they take the
gateway's time, which everybody shares. They are given at once, and what a tenant asks next is read when it is within
the rate.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from provider.config.schema import MIB, QuotaConfig
from provider.refusal import Refusal
from symbiosis_priv.network.tls import TenantIdentity
from symbiosis_priv.network.wire import ErrorCode

_PATIENCE_S = 1.0
_GIGA = 1e9
_REMEMBERED = 1024  # tenants
_AT_ONCE = nullcontext()
_ASIDES = QuotaConfig(requests_per_s=1000.0, rows_per_s=100.0 * MIB)  # whose rows are bytes that are read past


class Meter:
    """What one tenant has taken lately. Told the time; knows no locks.

    Args:
        now: seconds of a monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self.rows_in_flight = 0
        self._levels: dict[str, float] = {}  # of each bucket; negative in debt
        self._when = now

    def delay(self, quota: QuotaConfig, now: float) -> float:
        """Seconds until no bucket is in debt; 0 if none is."""
        passed, self._when = now - self._when, now
        rates = _rates(quota)
        self._levels = {name: min(rate, self._levels.get(name, rate) + rate * passed) for name, rate in rates.items()}
        return max((-level / rates[name] for name, level in self._levels.items() if level < 0), default=0.0)

    def take(self, *, rows: int, work: int) -> None:
        """A request is let in."""
        for name, amount in (("requests", 1), ("rows", rows), ("work", work)):
            if name in self._levels:
                self._levels[name] -= amount
        self.rows_in_flight += rows


class QuotaGate:
    """Lets tenants' requests in. Thread-safe.

    Args:
        quotas: what a tenant may have.
    """

    def __init__(self, quotas: Callable[[TenantIdentity], QuotaConfig]) -> None:
        self.renew(quotas)
        self._meters: dict[TenantIdentity, Meter] = {}
        self._asides: dict[TenantIdentity, Meter] = {}
        self._changed = threading.Condition()

    def renew(self, quotas: Callable[[TenantIdentity], QuotaConfig]) -> None:
        """For requests that come from now on."""
        self.of = functools.lru_cache(_REMEMBERED)(quotas)

    def admitted(self, tenant: TenantIdentity, *, rows: int, work: int) -> AbstractContextManager[None]:
        """Hold a request's place while it is served; waits a little for it.

        Raises, when it is entered:
            Refusal: BUSY if it would take long, TOO_LARGE if it never can.
        """
        quota = self.of(tenant)
        return _AT_ONCE if quota.limits_nothing else self._in_turn(tenant, quota, rows=rows, work=work)

    def pause(self, tenant: TenantIdentity, *, size: int) -> float:
        """For how many seconds nothing is read from where a tenant was given a refusal or a report.

        Args:
            size: bytes that were read past for it.
        """
        with self._changed:
            meter, now = self._asides.setdefault(tenant, Meter(time.monotonic())), time.monotonic()
            meter.delay(_ASIDES, now)
            meter.take(rows=size, work=0)
            return meter.delay(_ASIDES, now)

    @contextmanager
    def _in_turn(self, tenant: TenantIdentity, quota: QuotaConfig, *, rows: int, work: int) -> Iterator[None]:
        if quota.max_rows_in_flight is not None and rows > quota.max_rows_in_flight:
            raise Refusal(ErrorCode.TOO_LARGE, f"{rows} rows; this tenant's quota is {quota.max_rows_in_flight}")
        with self._changed:
            meter = self._meters.setdefault(tenant, Meter(time.monotonic()))
            self._wait(meter, quota, rows)
            meter.take(rows=rows, work=work)
        try:
            yield
        finally:
            with self._changed:
                meter.rows_in_flight -= rows
                self._changed.notify_all()

    def _wait(self, meter: Meter, quota: QuotaConfig, rows: int) -> None:
        end = time.monotonic() + _PATIENCE_S
        limit = quota.max_rows_in_flight
        while True:
            now = time.monotonic()
            delay, left = meter.delay(quota, now), end - now
            full = limit is not None and meter.rows_in_flight + rows > limit
            if not delay and not full:
                return
            if left <= 0 or delay > left:
                raise Refusal(ErrorCode.BUSY, "this tenant's quota is used up for now; ask again later")
            self._changed.wait(delay or left)


def _rates(quota: QuotaConfig) -> Mapping[str, float]:
    """What is limited, in requests, rows and multiply-adds a second."""
    work = None if quota.giga_multiply_adds_per_s is None else _GIGA * quota.giga_multiply_adds_per_s
    rates = {"requests": quota.requests_per_s, "rows": quota.rows_per_s, "work": work}
    return {name: rate for name, rate in rates.items() if rate is not None}
