"""Unauthenticated connections: a limited number of places, and which connection is dropped when all are taken.

The network with the most connections loses one: an IPv4 address, or an IPv6 /64, because one client can have all
addresses of a /64. Of that network, or of networks with equally many connections, silent connections are dropped before
connections that have sent something, and the oldest first. So many connections from one network cost the clients of
another network nothing.

A connection that takes too long is dropped too. Its time does not run while it waits for its turn: else many slow
handshakes would make clients late that have done their part.
"""

from __future__ import annotations

import heapq
import ipaddress
import itertools
import math
import socket
import threading
from collections.abc import Iterator


class Stranger:
    """One such connection.

    Args:
        connection: not blocking; `speak` replaces it by the one that TLS has taken over.
        host: the peer's address.
        deadline: when it must have authenticated, by `time.monotonic()`; `Strangers.resume` moves it.
    """

    def __init__(self, connection: socket.socket, host: str, *, deadline: float) -> None:
        self.socket = connection
        self.network = network_of(host)
        self.deadline = deadline
        self.silent = True
        self.clock = -1  # which `Strangers` knows, while its time runs


class Strangers:
    """All of them, in order of arrival. Thread-safe.

    Args:
        limit: places.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._present: dict[Stranger, None] = {}
        self._crowds: dict[str, dict[Stranger, None]] = {}  # by network
        self._clocks: dict[int, Stranger] = {}  # of those whose time runs
        self._due: list[tuple[float, int]] = []  # (deadline, clock), a heap; of clocks that have been stopped, too
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._present)

    def come(self, stranger: Stranger) -> Stranger | None:
        """One more; returns who has to go for it, if anybody."""
        with self._lock:
            self._present[stranger] = None
            self._start_clock(stranger)
            self._crowds.setdefault(stranger.network, {})[stranger] = None
            if len(self._present) <= self._limit:
                return None
            silent = (s for crowd in self._busiest() for s in crowd if s.silent)
            return next(silent, None) or next(iter(next(self._busiest())))

    def _busiest(self) -> Iterator[dict[Stranger, None]]:
        """Of the networks with the most, the first is the one that came first. Quick: this is for all who come."""
        most = max(map(len, self._crowds.values()))
        return (crowd for crowd in self._crowds.values() if len(crowd) == most)

    def pause(self, stranger: Stranger, now: float) -> None:
        """Its time does not run until `resume`."""
        with self._lock:
            if self._clocks.pop(stranger.clock, None) is not None:
                stranger.deadline -= now

    def resume(self, stranger: Stranger, now: float) -> None:
        """After `pause`: it has as much time left as it had then."""
        with self._lock:
            stranger.deadline += now
            self._start_clock(stranger)

    def _start_clock(self, stranger: Stranger) -> None:
        if stranger.deadline < math.inf:
            stranger.clock = next(self._numbers)
            self._clocks[stranger.clock] = stranger
            heapq.heappush(self._due, (stranger.deadline, stranger.clock))

    def speak(self, stranger: Stranger, connection: socket.socket) -> bool:
        """Its first bytes have come. Whether it still has its place: else it was hung up on by its socket of before."""
        with self._lock:
            stranger.socket, stranger.silent = connection, False
            return stranger in self._present

    def leave(self, stranger: Stranger) -> None:
        """It has authenticated, or gone; once is enough."""
        with self._lock:
            if stranger not in self._present:
                return
            del self._present[stranger]
            self._clocks.pop(stranger.clock, None)
            crowd = self._crowds[stranger.network]
            del crowd[stranger]
            if not crowd:
                del self._crowds[stranger.network]

    def all(self) -> list[Stranger]:
        """Everybody who is here."""
        with self._lock:
            return list(self._present)

    def late(self, now: float) -> list[Stranger]:
        """Those whose time is over: each of them once."""
        late = []
        with self._lock:
            while self._due and self._due[0][0] <= now:
                _, clock = heapq.heappop(self._due)
                if clock in self._clocks:
                    late.append(self._clocks.pop(clock))
        return late

    @property
    def next_deadline(self) -> float | None:
        """The first; None if nobody's time runs."""
        with self._lock:
            while self._due and self._due[0][1] not in self._clocks:
                heapq.heappop(self._due)
            return self._due[0][0] if self._due else None


def network_of(host: str) -> str:
    """What counts as one peer: an IPv4 address (mapped ones too), a /64 of IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)
