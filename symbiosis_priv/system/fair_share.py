"""The rule by which clients share a limited amount: no client holds more than stays free for others."""

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FairShare(Generic[K]):
    """Shares an amount (places, connections, bytes) among clients, none of which is known in advance.

        places = FairShare[str](16)
        if not places.take("alice"):
            raise Busy
        ...
        places.give_back("alice")

    No client holds more than stays free after it has taken; one unit more, so that a single unit can be taken. So a
    client that holds nothing always finds room for a first unit: one client gets half of the amount, n clients that
    take what they can get `total / (n + 1)` each. Not thread-safe: the caller has a lock, whose condition it can also
    wait for. `total` may be changed at any time.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._held = Counter[K]()

    @property
    def used(self) -> int:
        """What all clients hold."""
        return self._held.total()

    @property
    def free(self) -> int:
        return self.total - self.used

    def held(self, client: K) -> int:
        return self._held[client]

    def may_take(self, client: K, amount: int = 1) -> bool:
        """Returns True if `take` would succeed now."""
        return self._held[client] + amount <= self.free - amount + 1

    def take(self, client: K, amount: int = 1) -> bool:
        """Take an amount for a client. Returns False, and takes nothing, if that exceeds the client's share."""
        if not self.may_take(client, amount):
            return False
        self._held[client] += amount
        return True

    def give_back(self, client: K, amount: int = 1) -> None:
        """Return what a client has taken."""
        self._held[client] -= amount
        if not self._held[client]:
            del self._held[client]
