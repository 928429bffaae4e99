"""Gives clients equal turns, and the adapters of a client equal parts of its turns."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from symbiosis_priv.errors import OverloadedError
from tenant.endpoint.engine.requests import EngineRequest


class Submitted(Protocol):
    """An engine's object for a request."""

    @property
    def request(self) -> EngineRequest: ...


S = TypeVar("S", bound=Submitted)


class Turns(Generic[S]):
    """A queue of requests. Clients take turns; within a client's turns, its adapters take turns."""

    def __init__(self, waiting: Iterable[S] = ()) -> None:
        self._clients: OrderedDict[str, OrderedDict[str | None, deque[S]]] = OrderedDict()
        for one in waiting:
            self.add(one)

    def __len__(self) -> int:
        return sum(map(self.count, self._clients))

    def __iter__(self) -> Iterator[S]:
        return (one for adapters in self._clients.values() for queue in adapters.values() for one in queue)

    def count(self, client: str) -> int:
        """Return the number of requests of one client."""
        return sum(map(len, self._clients.get(client, {}).values()))

    def check_share(self, client: str, total: int) -> None:
        """Raise `OverloadedError` if a client has as many requests as stay free of `total` places."""
        if self.count(client) >= total - len(self):
            raise OverloadedError(f"{len(self)} requests are waiting; try again later")

    def add(self, one: S) -> None:
        """Add a request at the end of the queue of its client and adapter."""
        adapters = self._clients.setdefault(one.request.client, OrderedDict())
        adapters.setdefault(one.request.adapter, deque()).append(one)

    def first(self) -> S | None:
        """Return the next request in turn; None if there is none."""
        return next(self.firsts(), None)

    def firsts(self) -> Iterator[S]:
        """Return the first request of each client, in the order of their turns."""
        return (next(iter(adapters.values()))[0] for adapters in self._clients.values())

    def remove(self, one: S) -> None:
        """Remove a request. Its client and its adapter go to the end of the order of turns."""
        request = one.request
        adapters = self._clients.pop(request.client)
        queue = adapters.pop(request.adapter)
        queue.remove(one)
        if queue:
            adapters[request.adapter] = queue
        if adapters:
            self._clients[request.client] = adapters
