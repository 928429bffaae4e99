"""Rate limits: one token bucket for each recent client."""

import threading
from collections import OrderedDict

from provider.fairness.token_bucket import TokenBucket


class Rates:
    """A token bucket for each of the `most` most recent clients. A client that was dropped gets a full bucket again.
    Thread-safe."""

    def __init__(self, *, per_s: float, burst: float, most: int = 4096) -> None:
        self._per_s = per_s
        self._burst = burst
        self._most = most
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, client: str, *, now: float) -> bool:
        """Take a token from the client's bucket. Returns False if there is none. `now` is on a monotonic clock."""
        with self._lock:
            bucket = self._buckets.pop(client, None) or TokenBucket(per_s=self._per_s, burst=self._burst, now=now)
            self._buckets[client] = bucket
            if len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
            if bucket.tokens(now) < 1:
                return False
            bucket.take(1)
            return True
