"""Gives clients and adapters equal turns."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator

from tenant.endpoint.engine.sequence import Sequence


class Turns:
    """Sequences that wait for something. Each pair of client and adapter has a queue; the queues take turns."""

    def __init__(self, sequences: Iterable[Sequence] = ()) -> None:
        self._queues: OrderedDict[Hashable, deque[Sequence]] = OrderedDict()
        for sequence in sequences:
            self.add(sequence)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._queues.values() for sequence in queue)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of its queue."""
        self._queues.setdefault(_queue(sequence), deque()).append(sequence)

    def first(self) -> Sequence | None:
        """Return the sequence whose turn it is; None if none waits."""
        return next(iter(self), None)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out. Its queue has had its turn."""
        key = _queue(sequence)
        queue = self._queues.pop(key)
        queue.remove(sequence)
        if queue:
            self._queues[key] = queue


def _queue(sequence: Sequence) -> Hashable:
    return sequence.request.client, sequence.request.adapter
