"""A queue that serves clients in turn. Handshakes and keystream use it."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Hashable)


class RoundRobin(Generic[K, V]):
    """A first-in, first-out queue for each client; clients take turns. Not thread-safe.

    An item waits for the earlier items of its own client, and for at most as many items of each other client.
    """

    def __init__(self) -> None:
        # the first client in the dictionary has the next turn
        self._queues: OrderedDict[K, OrderedDict[V, None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def put(self, client: K, item: V) -> None:
        """Append an item to its client's queue."""
        self._queues.setdefault(client, OrderedDict())[item] = None

    def of(self, client: K) -> list[V]:
        """The items of one client, oldest first."""
        return list(self._queues.get(client, ()))

    def remove(self, client: K, item: V) -> bool:
        """Remove an item. Returns False if it was not there."""
        queue = self._queues.get(client)
        if queue is None or item not in queue:
            return False
        del queue[item]
        if not queue:
            del self._queues[client]
        return True

    def get(self) -> V:
        """Remove and return the next client's oldest item. Raises KeyError if there is none."""
        client, queue = self._queues.popitem(last=False)
        item, _ = queue.popitem(last=False)
        if queue:
            self._queues[client] = queue
        return item

    @property
    def longest(self) -> tuple[K, int]:
        """The client with the most items, and their number. Raises ValueError if there is none."""
        client = max(self._queues, key=lambda client: len(self._queues[client]))
        return client, len(self._queues[client])
