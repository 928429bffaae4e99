"""Rate limits: one token bucket for each client that was seen lately."""

from __future__ import annotations

import threading
from collections import OrderedDict


class Rates:
    """Thread-safe. The caller passes the time.

    Args:
        per_s: tokens that a bucket regains per second.
        burst: tokens that a bucket holds.
        most: buckets; beyond that the one that was unused for the longest time is dropped, and starts full again.
    """

    def __init__(self, *, per_s: float, burst: float, most: int = 4096) -> None:
        self._per_s = per_s
        self._burst = burst
        self._most = most
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when they were counted
        self._lock = threading.Lock()

    def take(self, client: str, *, now: float) -> bool:
        """Take a token from the client's bucket. Returns False if there is none.

        Args:
            now: seconds of a monotonic clock.
        """
        with self._lock:
            tokens, counted = self._buckets.pop(client, (self._burst, now))
            tokens = min(self._burst, tokens + self._per_s * (now - counted))
            granted = tokens >= 1
            self._buckets[client] = (tokens - granted, now)
            if len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
            return granted
