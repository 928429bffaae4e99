"""Quotas of tenants: limits of their rates.

Each rate has a token bucket that holds the tokens of one second (of `burst_s` where a tenant's requests are divided
among several processes, which it asks one after the other). A request is admitted while no bucket is in debt, and
may leave a bucket in debt: a large request is admitted too, and later ones wait for it.
"""

import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable

from provider import logs
from provider.config.schema import MIB, QuotaConfig
from provider.fairness import TokenBucket
from provider.refusal import Refusal
from symbiosis_priv.network.tls import TenantIdentity
from symbiosis_priv.network.wire import ErrorCode, QuotaLimit

log = logs.EventLog(__name__)

_PATIENCE_S = 1.0  # longest wait of a request
_LOG_AGAIN_S = 60.0
_REMEMBERED = 1024  # tenants whose quota is cached
_NO_PRODUCT = QuotaConfig(requests_per_s=1000.0, rows_per_s=100.0 * MIB)  # here, rows are bytes read and dropped


class QuotaMeter:
    """The token buckets of one tenant. The caller passes the time of a monotonic clock. Not thread-safe."""

    def __init__(self, now: float, burst_s: float = 1.0) -> None:
        self._burst_s = burst_s
        self.logged_at = -math.inf
        self._buckets: dict[str, TokenBucket] = {}
        self._now = now

    def delay(self, quota: QuotaConfig, now: float) -> float:
        """Seconds until no bucket is in debt; 0.0 if none is."""
        rates = _rates(quota)
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if name in rates}
        for name, rate in rates.items():
            burst = rate * self._burst_s
            if name in self._buckets:
                self._buckets[name].change(per_s=rate, burst=burst)
            else:
                self._buckets[name] = TokenBucket(per_s=rate, burst=burst, now=self._now)
        self._now = now
        return max((bucket.delay(now) for bucket in self._buckets.values()), default=0.0)

    def limit(self, quota: QuotaConfig) -> QuotaLimit:
        """The rate whose bucket is in debt for the longest time, as of the last `delay`."""
        name = max(self._buckets, key=lambda name: self._buckets[name].delay(self._now))
        amount = _rates(quota)[name]
        if name == "work":
            return QuotaLimit(amount=amount / 1e9, unit="billion multiply-adds/s")
        return QuotaLimit(amount=amount, unit="rows/s" if name == "rows" else "requests/s")

    def take(self, *, rows: int, work: int) -> None:
        """Take the tokens of an admitted request."""
        for name, amount in (("requests", 1), ("rows", rows), ("work", work)):
            if name in self._buckets:
                self._buckets[name].take(amount)


class QuotaGate:
    """Admits tenants' requests. Thread-safe."""

    def __init__(self, quotas: Callable[[TenantIdentity], QuotaConfig]) -> None:
        self.renew(quotas)
        self.burst_s = 1.0
        self._meters: dict[TenantIdentity, QuotaMeter] = {}
        self._no_product: dict[TenantIdentity, QuotaMeter] = {}  # for answers without a product
        self._limited: Counter[TenantIdentity] = Counter()
        self._changed = threading.Condition()

    def renew(self, quotas: Callable[[TenantIdentity], QuotaConfig]) -> None:
        """Apply new quotas to all later requests."""
        self.of = functools.lru_cache(_REMEMBERED)(quotas)
        self.limits_nothing = functools.lru_cache(_REMEMBERED)(lambda tenant: quotas(tenant).limits_nothing)

    def limited(self) -> dict[TenantIdentity, int]:
        """Number of requests per tenant that waited or were refused because of the tenant's quota."""
        with self._changed:
            return dict(self._limited)

    def admit(self, tenant: TenantIdentity, *, rows: int, work: int) -> QuotaLimit | None:
        """Wait until the quota admits a request. Returns the limit that the request waited for, or None. Raises
        `Refusal` BUSY if the request would wait for more than one second."""
        if self.limits_nothing(tenant):
            return None
        limit: QuotaLimit | None = None
        quota = self.of(tenant)
        with self._changed:
            meter = self._meters.setdefault(tenant, QuotaMeter(time.monotonic(), self.burst_s))
            end = time.monotonic() + _PATIENCE_S
            while delay := meter.delay(quota, now := time.monotonic()):
                if limit is None:
                    self._limited[tenant] += 1
                limit = meter.limit(quota)
                if now - meter.logged_at > _LOG_AGAIN_S:
                    meter.logged_at = now
                    log.warning("over_quota", tenant=str(tenant), quota=str(limit), requests=self._limited[tenant])
                if delay > end - now:
                    raise Refusal(ErrorCode.BUSY, f"your quota is {limit}; ask again later", limit=limit)
                self._changed.wait(delay)
            meter.take(rows=rows, work=work)
        return limit

    def debt(self, tenant: TenantIdentity) -> float:
        """Seconds until the client has paid for answers without a product, on all its connections."""
        with self._changed:
            meter = self._no_product.get(tenant)
            return 0.0 if meter is None else meter.delay(_NO_PRODUCT, time.monotonic())

    def pause(self, tenant: TenantIdentity, *, size: int) -> float:
        """Count an answer without a product, for which `size` bytes were read and dropped. Returns the seconds before
        the gateway may read the tenant's next request."""
        with self._changed:
            meter, now = self._no_product.setdefault(tenant, QuotaMeter(time.monotonic())), time.monotonic()
            meter.delay(_NO_PRODUCT, now)
            meter.take(rows=size, work=0)
            return meter.delay(_NO_PRODUCT, now)


def _rates(quota: QuotaConfig) -> dict[str, float]:
    """Limits in requests, rows and multiply-adds a second."""
    work = None if quota.giga_multiply_adds_per_s is None else 1e9 * quota.giga_multiply_adds_per_s
    rates = {"requests": quota.requests_per_s, "rows": quota.rows_per_s, "work": work}
    return {name: rate for name, rate in rates.items() if rate is not None}
