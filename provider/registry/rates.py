"""How often somebody may do something: a bucket of tokens for everybody who has been here lately."""

from __future__ import annotations

import threading
from collections import OrderedDict


class Rates:
    """Thread-safe. Told the time.

    Args:
        per_s: tokens that come back.
        burst: that a bucket holds.
        most: buckets; who has not been here for the longest time is forgotten, and then has a full one.
    """

    def __init__(self, *, per_s: float, burst: float, most: int = 4096) -> None:
        self._per_s = per_s
        self._burst = burst
        self._most = most
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when
        self._lock = threading.Lock()

    def take(self, who: str, *, now: float) -> bool:
        """Whether there was a token left.

        Args:
            who: whose bucket.
            now: seconds of a monotonic clock.
        """
        with self._lock:
            tokens, when = self._buckets.pop(who, (self._burst, now))
            tokens = min(self._burst, tokens + self._per_s * (now - when))
            granted = tokens >= 1
            self._buckets[who] = (tokens - granted, now)
            if len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
            return granted
