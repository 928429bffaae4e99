"""Limits the number of unauthenticated connections. One more drops one.

The network with the most connections loses one. A network is an IPv4 address, or an IPv6 /64, because one client can
have all addresses of a /64. Of that network, or of networks with equally many connections, silent connections are
dropped before connections that have sent something, and the oldest of them first. So many connections from one network
cost the clients of another network nothing.

A connection that takes too long is dropped too. Its time does not run while it waits for its turn: otherwise many slow
handshakes would make other clients late.

`reception` authenticates its clients in one thread. Servers whose clients never authenticate, the registry and the
operator's address, serve each connection in a thread of its own (`UnauthenticatedListener`).
"""

import heapq
import ipaddress
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from provider import logs
from symbiosis_priv.network.addresses import bound_address, listen
from symbiosis_priv.network.stream import FrameStream, shut

log = logs.EventLog(__name__)

_BACKLOG: Final = 256
_ACCEPT_S: Final = 0.5  # interval at which the accept loop looks for a stop


class UnauthenticatedConnection:
    """A connection whose client has not authenticated.

    Args:
        deadline: time by which the connection must have ended or authenticated, by `time.monotonic()`.
            `UnauthenticatedConnections.resume` moves it.
    """

    def __init__(self, connection: socket.socket, host: str, *, deadline: float) -> None:
        self.socket = connection
        self.network = network_of(host)
        self.deadline = deadline
        self.silent = True
        self.stream: FrameStream | None = None  # set when the handshake has begun
        self.clock = -1  # key in `UnauthenticatedConnections` while the time runs


class UnauthenticatedConnections:
    """The unauthenticated connections, in order of arrival. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._present: dict[UnauthenticatedConnection, None] = {}
        self._by_network: dict[str, dict[UnauthenticatedConnection, None]] = {}
        self._clocks: dict[int, UnauthenticatedConnection] = {}  # connections whose time runs
        self._due: list[tuple[float, int]] = []  # a heap of (deadline, clock), including stopped clocks
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._present)

    def add(self, client: UnauthenticatedConnection) -> UnauthenticatedConnection | None:
        """Add a connection. Returns the connection that must be dropped for it, or None."""
        with self._lock:
            self._present[client] = None
            self._start_clock(client)
            self._by_network.setdefault(client.network, {})[client] = None
            if len(self._present) <= self._limit:
                return None
            silent = (s for clients in self._busiest() for s in clients if s.silent)
            return next(silent, None) or next(iter(next(self._busiest())))

    def _busiest(self) -> Iterator[dict[UnauthenticatedConnection, None]]:
        """The connections of each network with the most connections, in order of arrival of the networks."""
        most = max(map(len, self._by_network.values()))
        return (clients for clients in self._by_network.values() if len(clients) == most)

    def pause(self, client: UnauthenticatedConnection, now: float) -> None:
        """Stop the countdown to a connection's deadline until `resume`."""
        with self._lock:
            if self._clocks.pop(client.clock, None) is not None:
                client.deadline -= now

    def resume(self, client: UnauthenticatedConnection, now: float) -> None:
        """Continue the countdown to a connection's deadline, with the time that was left at `pause`."""
        with self._lock:
            client.deadline += now
            self._start_clock(client)

    def _start_clock(self, client: UnauthenticatedConnection) -> None:
        if client.deadline < math.inf:
            client.clock = next(self._numbers)
            self._clocks[client.clock] = client
            heapq.heappush(self._due, (client.deadline, client.clock))

    def mark_active(self, client: UnauthenticatedConnection, stream: FrameStream | None = None) -> bool:
        """Record that a connection has sent its first bytes, and its stream. Returns False if the connection was
        dropped."""
        with self._lock:
            client.stream, client.silent = stream, False
            return client in self._present

    def remove(self, client: UnauthenticatedConnection) -> None:
        """Remove a connection that has authenticated or ended. Does nothing if the connection was removed before."""
        with self._lock:
            if client not in self._present:
                return
            del self._present[client]
            self._clocks.pop(client.clock, None)
            clients = self._by_network[client.network]
            del clients[client]
            if not clients:
                del self._by_network[client.network]

    def all(self) -> list[UnauthenticatedConnection]:
        with self._lock:
            return list(self._present)

    def late(self, now: float) -> list[UnauthenticatedConnection]:
        """The connections whose deadline has passed; each is returned once."""
        late = []
        with self._lock:
            while self._due and self._due[0][0] <= now:
                _, clock = heapq.heappop(self._due)
                if clock in self._clocks:
                    late.append(self._clocks.pop(clock))
        return late

    @property
    def next_deadline(self) -> float | None:
        """The next deadline; None if no connection's time runs."""
        with self._lock:
            while self._due and self._due[0][1] not in self._clocks:
                heapq.heappop(self._due)
            return self._due[0][0] if self._due else None


class UnauthenticatedListener:
    """Accepts clients that do not authenticate, and serves each in a thread of its own.

    A connection that is dropped for a new one ends first, so connections and threads never exceed the limit.

    Args:
        address: `host:port` to listen at.
        limit: largest number of connections.
        serve: serves one connection, in its thread. The connection is closed when `serve` returns or raises.
        connection_s: longest duration of a connection. `serve` observes the deadline.
        closing_s: seconds in which `serve` ends after its socket has been shut.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        limit: int,
        serve: Callable[[UnauthenticatedConnection], None],
        connection_s: float,
        closing_s: float,
    ) -> None:
        self._serve, self._connection_s, self._closing_s = serve, connection_s, closing_s
        self._present = UnauthenticatedConnections(limit)
        self._threads: dict[UnauthenticatedConnection, threading.Thread] = {}
        self._lock = threading.Lock()
        self.stopping = threading.Event()
        self._listener = listen(address, backlog=_BACKLOG)
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)

    @property
    def address(self) -> str:
        """The bound address, as `host:port`."""
        return bound_address(self._listener)

    def start(self) -> None:
        self._acceptor.start()

    def stop(self) -> None:
        """Close the address and all connections. Returns within about `closing_s`."""
        self.stopping.set()
        shut(self._listener)  # wakes `accept` where the system does so
        if self._acceptor.ident is not None:
            self._acceptor.join()
        self._listener.close()
        for client in self._present.all():
            shut(client.socket)
        deadline = time.monotonic() + self._closing_s
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        self._listener.settimeout(_ACCEPT_S)
        while not self.stopping.is_set():
            try:
                raw, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # for instance no more file descriptors
                if self.stopping.is_set():
                    return
                log.often("accept_failed", error=type(error).__name__)
                self.stopping.wait(_ACCEPT_S)
                continue
            client = UnauthenticatedConnection(raw, peer[0], deadline=time.monotonic() + self._connection_s)
            if (crowded_out := self._present.add(client)) is not None:
                self._close_dropped(crowded_out)
            if crowded_out is client:
                raw.close()
            else:
                self._begin(client)

    def _close_dropped(self, crowded_out: UnauthenticatedConnection) -> None:
        """Close the connection that was dropped, and wait for its thread."""
        log.often("connection_dropped", address=crowded_out.network)
        self._present.remove(crowded_out)
        shut(crowded_out.socket)  # the connection's thread closes the socket
        with self._lock:
            thread = self._threads.get(crowded_out)
        if thread is not None:
            thread.join(self._closing_s)

    def _begin(self, client: UnauthenticatedConnection) -> None:
        thread = threading.Thread(target=self._run, args=(client,), name="connection", daemon=True)
        with self._lock:
            self._threads[client] = thread
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be started
            log.often("accept_failed", error=type(error).__name__)
            self._forget(client)

    def _run(self, client: UnauthenticatedConnection) -> None:
        try:
            self._serve(client)
        except Exception as error:  # a bug must not end the server
            log.failure("connection_failed", error)
        finally:
            self._forget(client)

    def _forget(self, client: UnauthenticatedConnection) -> None:
        client.socket.close()
        with self._lock:
            del self._threads[client]
        self._present.remove(client)


def network_of(host: str) -> str:
    """The network that counts as one client: an IPv4 address (also a mapped one), or an IPv6 /64."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)
