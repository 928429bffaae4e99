"""Accepts connections and serves each in a thread of its own: for gateway, registry and the operator's address.

Theory of operation. One thread accepts connections, waits for what their clients send, and makes their TLS handshakes,
one step at a time. It never waits for a client. Until a client is greeted, it has no thread, only a place. Clients take
turns by network: an IPv4 address, or an IPv6 /64, because one client can have all addresses of a /64.

Many networks cost little: who has an IPv6 /48 has 65,536 of them. So networks from which a client has authenticated
within the last day take turns among themselves, and lose no place to many others.

At the gateway, a client that was greeted has authenticated, and gives its place back. The clients of the registry and
of the operator's address never authenticate, and keep their places to the end.
"""

import errno
import ipaddress
import itertools
import math
import select
import selectors
import socket
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Final, Generic, TypeVar

import msgspec

from provider import logs
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.network.addresses import bound_address, listen
from symbiosis_priv.network.stream import FrameStream, shut

log = logs.EventLog(__name__)

P = TypeVar("P")

_BACKLOG: Final = 1024
_AT_ONCE: Final = 16  # connections that are accepted, or steps that are made, before the others have their turn
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S: Final = 0.1  # when the machine is out of descriptors or threads
_REMEMBERED: Final = 4096  # networks
_KNOWN_S: Final = 86_400.0


class Handshakes(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of handshakes since the start, by outcome."""

    present: int  # clients that have not authenticated yet
    accepted: int = 0
    refused: int = 0  # clients that showed no good certificate, broke the protocol, or left
    late: int = 0
    crowded_out: int = 0  # clients that were dropped because their network had too many


class UnauthenticatedConnection:
    """A connection whose client was not greeted yet, or never authenticates. The client must be greeted by `deadline`.
    If it is `known`, a client of its network has authenticated recently."""

    def __init__(self, connection: socket.socket, host: str, *, deadline: float, known: bool = False) -> None:
        self.socket = connection
        self.host, self.network = host, network_of(host)
        self.deadline = deadline
        self.known = known
        self.silent = True  # it has not sent its first bytes
        self.stream: FrameStream | None = None  # set when the handshake has begun

    def handshake(self, context: ssl.SSLContext) -> FrameStream:
        """Make a step of the TLS handshake. Raises TimeoutError if the client must send or read more."""
        if self.stream is None:
            self.stream = FrameStream(self.socket, context)
        self.stream.handshake(None)
        return self.stream


class Turns:
    """The turns of networks: next is the network whose last turn was longest ago, or that came before that."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()  # number of the last turn or of the arrival, by network
        self._count = itertools.count(1)

    def arrived(self, network: str) -> None:
        if network not in self._last:
            remember(self._last, network, next(self._count))

    def next(self, waiting: Iterable[UnauthenticatedConnection]) -> list[UnauthenticatedConnection]:
        """Choose one client of each of at most 16 networks, in turn. Known and other networks alternate."""
        first: dict[str, UnauthenticatedConnection] = {}
        for client in waiting:
            first.setdefault(client.network, client)
        in_turn = sorted(first.values(), key=lambda client: self._last.get(client.network, 0))
        known, others = ([client for client in in_turn if client.known is each] for each in (True, False))
        pairs = itertools.chain.from_iterable(itertools.zip_longest(known, others))
        chosen = [client for client in pairs if client is not None][:_AT_ONCE]
        for client in chosen:
            remember(self._last, client.network, next(self._count))
        return chosen


V = TypeVar("V")


def remember(memory: OrderedDict[str, V], network: str, value: V) -> None:
    memory[network] = value
    memory.move_to_end(network)
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)


def to_drop(present: Collection[UnauthenticatedConnection]) -> UnauthenticatedConnection:
    """The connection that loses its place: of the network with the most, a silent one if there is one, and the oldest.
    While networks without an authenticated client hold more than half of the places, one of them loses it."""
    unknown = [client for client in present if not client.known]
    candidates = unknown if 2 * len(unknown) >= len(present) else present
    crowd = Counter(client.network for client in candidates)
    most = max(crowd.values())
    busiest = [client for client in candidates if crowd[client.network] == most]
    return next((client for client in busiest if client.silent), busiest[0])


class Listener(Generic[P]):
    """Accepts clients, greets them in turn, and serves each in a thread of its own; see the module docstring.

        listener = Listener(address, limit=256, greeting_s=10.0, greet=lambda client: client.handshake(context),
                            serve=serve)
        listener.start()
        listener.stop(timeout=10.0)

    `greet` is called with a client that has sent something, possibly several times, and returns what identifies the
    client. It does not wait: it raises TimeoutError if the client must send or read more, another error to refuse it.
    `serve` serves a greeted client, in its thread. The connection is closed when it returns or raises. Raises
    `ConfigError`: the address cannot be used."""

    def __init__(
        self,
        address: str,
        *,
        limit: int,  # of unauthenticated connections; if none authenticates, one that is dropped ends before others
        greeting_s: float,
        greet: Callable[[UnauthenticatedConnection], P],
        serve: Callable[[UnauthenticatedConnection, P], None],
        authenticates: bool = False,  # a greeted client has authenticated
    ) -> None:
        self._limit, self._greeting_s, self._greet, self._serve = limit, greeting_s, greet, serve
        self._authenticates = authenticates
        self._waiting: dict[UnauthenticatedConnection, None] = {}  # to be greeted, in order of arrival
        self._threads: dict[UnauthenticatedConnection, threading.Thread] = {}
        self._turns = Turns()
        self._authenticated: OrderedDict[str, float] = OrderedDict()  # time of the last authentication, by network
        self._outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.stopping = threading.Event()
        self._listener = listen(address, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)

    @property
    def address(self) -> str:
        return bound_address(self._listener)

    @property
    def handshakes(self) -> Handshakes:
        """Counts of greetings. Thread-safe."""
        return Handshakes(present=len(self._places()), **dict(self._outcomes))

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Stop accepting, and close. A thread that waits for its client's next request ends at once; one that answers a
        request finishes within `timeout` seconds. Returns True if every thread has ended."""
        deadline = time.monotonic() + timeout
        self.stopping.set()
        self._waker.close()  # the other end becomes readable, and stays so
        if self._thread.ident is None:
            for each in (self._selector, self._listener, self._wake):
                each.close()
        else:
            self._thread.join(timeout)
        for how, end in ((socket.SHUT_RD, deadline), (socket.SHUT_RDWR, deadline + 1.0)):
            with self._lock:
                threads = list(self._threads.items())
            for client, _ in threads:
                shut(client.socket, how)
            for _, thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
        return not self._threads

    def _places(self) -> list[UnauthenticatedConnection]:
        with self._lock:
            return [*self._waiting, *(() if self._authenticates else self._threads)]

    def _run(self) -> None:
        with self._selector, self._listener, self._wake:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._wake, selectors.EVENT_READ)
            while not self.stopping.is_set():
                try:
                    self._look()
                except Exception as error:  # for example lack of memory: nobody else accepts clients
                    log.failure("listener_failed", error)
                    select.select([self._wake], [], [], _PAUSE_S)
            for client in list(self._waiting):
                self._drop(client, "late")

    def _look(self) -> None:
        deadline = next(iter(self._waiting)).deadline if self._waiting else math.inf
        pause_s = max(0.0, deadline - time.monotonic()) if self._waiting else None
        ready = [key for key, _ in self._selector.select(pause_s)]
        if any(key.fileobj is self._listener for key in ready):
            self._attempt(self._accept)
        for client in self._turns.next(key.data for key in ready if key.data in self._waiting):
            self._attempt(partial(self._step, client))
        while self._waiting and (client := next(iter(self._waiting))).deadline <= time.monotonic():
            self._drop(client, "late")

    def _attempt(self, step: Callable[[], None]) -> None:
        """Run a step that can fail because the machine lacks resources or because the client has left."""
        try:
            step()
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) or error.errno in _EXHAUSTED:
                log.often("accept_failed", error=type(error).__name__)
                select.select([self._wake], [], [], _PAUSE_S)
        except Exception as error:  # a bug must not stop the listener
            log.failure("handshake_failed", error)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                raw, peer = self._listener.accept()
            except BlockingIOError:
                return
            now = time.monotonic()
            try:
                raw.setblocking(False)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                client = UnauthenticatedConnection(raw, peer[0], deadline=now + self._greeting_s)
                client.known = now < self._authenticated.get(client.network, -math.inf) + _KNOWN_S
                self._selector.register(raw, selectors.EVENT_READ, client)
            except BaseException:
                raw.close()
                raise
            with self._lock:
                self._waiting[client] = None
            self._turns.arrived(client.network)
            if len(places := self._places()) > self._limit:
                dropped = to_drop(places)
                log.often("handshake_dropped", address=dropped.network)
                self._drop(dropped, "crowded_out")

    def _drop(self, client: UnauthenticatedConnection, outcome: str) -> None:
        self._outcomes[outcome] += 1
        if client in self._waiting:
            self._take(client)
            client.socket.close()
            return
        with self._lock:
            thread = self._threads.get(client)
        if thread is not None:  # it closes its connection
            shut(client.socket)
            thread.join(self._greeting_s)

    def _take(self, client: UnauthenticatedConnection) -> None:
        """Wait no longer for what a client sends."""
        self._selector.unregister(client.socket)
        with self._lock:
            del self._waiting[client]

    # Greetings

    def _step(self, client: UnauthenticatedConnection) -> None:
        try:
            if client.stream is None and not client.socket.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError
            client.silent = False
            peer = self._greet(client)
        except TimeoutError:
            waits_to_send = client.stream is not None and client.stream.unsent
            self._selector.modify(
                client.socket, selectors.EVENT_WRITE if waits_to_send else selectors.EVENT_READ, client
            )
            return
        except BaseException as error:
            self._drop(client, "refused")
            if not isinstance(error, OSError | SymbiosisError) or getattr(error, "errno", None) in _EXHAUSTED:
                raise
            log.often("handshake_refused", reason=getattr(error, "reason", None) or type(error).__name__)
            return
        thread = threading.Thread(target=self._run_client, args=(client, peer), name="connection", daemon=True)
        self._take(client)
        with self._lock:
            self._threads[client] = thread
        if self._authenticates:
            self._outcomes["accepted"] += 1
            remember(self._authenticated, client.network, time.monotonic())
        try:
            thread.start()
        except RuntimeError:  # no thread can be started
            self._forget(client)
            raise

    # The clients' threads

    def _run_client(self, client: UnauthenticatedConnection, peer: P) -> None:
        try:
            self._serve(client, peer)
        except Exception as error:  # a bug must not end the server
            log.failure("connection_failed", error)
        finally:
            self._forget(client)

    def _forget(self, client: UnauthenticatedConnection) -> None:
        (client.socket if client.stream is None else client.stream).close()
        with self._lock:
            self._threads.pop(client, None)


def network_of(host: str) -> str:
    """The network that counts as one client: an IPv4 address (also a mapped one), or an IPv6 /64."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)
