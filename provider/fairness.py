"""Fair shares between clients: a queue in which clients take turns, and limited rates.

Keystream is made in turns; quotas and registries have rates.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """A first-in, first-out queue for each client; clients take turns. Not thread-safe. An item waits for the earlier
    items of its own client, and for at most as many items of each other client."""

    def __init__(self) -> None:
        # the first client in the dictionary has the next turn
        self._queues: OrderedDict[Hashable, deque[T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def put(self, client: Hashable, item: T) -> None:
        """Append an item to its client's queue."""
        self._queues.setdefault(client, deque()).append(item)

    def get(self) -> T:
        """Remove and return the next client's oldest item. Raises KeyError if there is none."""
        client, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._queues[client] = queue
        return item


class TokenBucket:
    """Tokens that are replenished at a rate above 0. The bucket starts full, with `burst` tokens, and may go into debt.
    The caller passes the time of a monotonic clock. Not thread-safe."""

    def __init__(self, *, per_s: float, burst: float, now: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._tokens, self._when = burst, now

    def change(self, *, per_s: float, burst: float) -> None:
        """Set another rate, which takes effect with the next `tokens` or `delay`."""
        self._per_s, self._burst = per_s, burst

    def tokens(self, now: float) -> float:
        """Number of tokens, including fractions; negative in debt."""
        self._tokens = min(self._burst, self._tokens + self._per_s * (now - self._when))
        self._when = now
        return self._tokens

    def delay(self, now: float) -> float:
        """Seconds until the bucket is not in debt; 0.0 if it is not in debt."""
        return max(0.0, -self.tokens(now) / self._per_s)

    def take(self, amount: float) -> None:
        """Take tokens. The bucket may go into debt."""
        self._tokens -= amount
