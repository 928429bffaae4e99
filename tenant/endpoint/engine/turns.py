"""Gives clients equal turns, and the adapters of a client equal parts of its turns."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from tenant.endpoint.engine.sequence import Sequence


class Turns:
    """Sequences that wait for something. Clients take turns; in its turn, a client's adapters take turns."""

    def __init__(self, sequences: Iterable[Sequence] = ()) -> None:
        self._clients: OrderedDict[str, OrderedDict[str | None, deque[Sequence]]] = OrderedDict()
        for sequence in sequences:
            self.add(sequence)

    def __len__(self) -> int:
        return sum(map(self.count, self._clients))

    def __iter__(self) -> Iterator[Sequence]:
        return (s for adapters in self._clients.values() for queue in adapters.values() for s in queue)

    def count(self, client: str) -> int:
        """Return the number of sequences of one client."""
        return sum(map(len, self._clients.get(client, {}).values()))

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of its queue."""
        request = sequence.request
        adapters = self._clients.setdefault(request.client, OrderedDict())
        adapters.setdefault(request.adapter, deque()).append(sequence)

    def first(self) -> Sequence | None:
        """Return the sequence whose turn it is; None if none waits."""
        return next(iter(self), None)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out. Its client and its adapter have had their turns."""
        request = sequence.request
        adapters = self._clients.pop(request.client)
        queue = adapters.pop(request.adapter)
        queue.remove(sequence)
        if queue:
            adapters[request.adapter] = queue
        if adapters:
            self._clients[request.client] = adapters
