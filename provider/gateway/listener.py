"""Accepts connections and serves each in a thread of its own: for gateway, registry and the operator's address.

Theory of operation. One thread accepts connections, waits for what their clients send, and makes their TLS handshakes,
one step at a time. It never waits for a client, and uses no more than its share of one core (`TokenBucket`): beyond
it, nothing is accepted and nobody is greeted for a moment. Clients take turns by network (`RoundRobin`). A network is
an IPv4 address, or an IPv6 /64, because one client can have all addresses of a /64.

Many networks cost little: who has an IPv6 /48 has 65,536 of them. So networks from which a client has authenticated
within the last day take turns among themselves, and wait for one step of all other networks together.

Before a client was greeted, it has no thread, only a place among the `UnauthenticatedConnections`. A client that takes
longer than `greeting_s` is dropped; its waits for a turn do not count. One connection too many drops the oldest one of
the network with the most. At the gateway, a client that was greeted has authenticated, and gives its place back. The
clients of the registry and of the operator's address never authenticate, and keep their places to the end.
"""

import contextlib
import errno
import ipaddress
import math
import select
import selectors
import socket
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

import msgspec

from provider import logs
from provider.fairness import RoundRobin, TokenBucket
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.network.addresses import bound_address, listen
from symbiosis_priv.network.stream import FrameStream, shut

log = logs.EventLog(__name__)

P = TypeVar("P")

SHARE: Final = 0.25  # share of one core for accepting and greeting, if nothing else is configured
_BACKLOG: Final = 1024
_AT_ONCE: Final = 16  # connections that are accepted, or steps that are made, before the others have their turn
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SAVED_S: Final = 0.002  # processor time that a pause saves
_PAUSE_S: Final = 0.1  # when the machine is out of descriptors or threads
_KNOWN: Final = 4096  # networks from which a client has authenticated
_KNOWN_S: Final = 86_400.0


class Handshakes(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of handshakes since the start, by outcome."""

    present: int  # clients that have not authenticated yet
    waiting: int  # those of them that have sent something and wait for their turn
    accepted: int = 0
    refused: int = 0  # clients that showed no good certificate, broke the protocol, or left
    late: int = 0
    crowded_out: int = 0  # clients that were dropped because their network had too many
    seconds: float  # processor time for accepting connections and for handshakes
    waited_s: float  # time that all clients together have waited for their turns


class UnauthenticatedConnection:
    """A connection whose client was not greeted yet, or never authenticates. The client must be greeted by `deadline`,
    which `UnauthenticatedConnections.resume` moves. If it is `known`, a client of its network has authenticated
    recently."""

    def __init__(self, connection: socket.socket, host: str, *, deadline: float, known: bool = False) -> None:
        self.socket = connection
        self.network = network_of(host)
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


class UnauthenticatedConnections:
    """The unauthenticated connections, in order of arrival. Thread-safe. One more than `limit` drops one, of the
    network with the most: a silent one if there is one, and the oldest. While networks without an authenticated client
    hold more than half of the places, one of them loses it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._present: dict[UnauthenticatedConnection, None] = {}
        self._by_network: dict[str, dict[UnauthenticatedConnection, None]] = {}
        self._timed: dict[UnauthenticatedConnection, None] = {}  # those whose time runs
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._present)

    def add(self, client: UnauthenticatedConnection) -> UnauthenticatedConnection | None:
        """Add a connection. Returns the connection that must be dropped for it, or None."""
        with self._lock:
            self._present[client] = None
            self._timed[client] = None
            self._by_network.setdefault(client.network, {})[client] = None
            if len(self._present) <= self._limit:
                return None
            silent = (s for clients in self._busiest() for s in clients if s.silent)
            return next(silent, None) or next(iter(next(self._busiest())))

    def _busiest(self) -> Iterator[dict[UnauthenticatedConnection, None]]:
        """The connections of each network with the most connections, in order of arrival of the networks."""
        networks = list(self._by_network.values())
        unknown = [clients for clients in networks if not next(iter(clients)).known]
        if 2 * sum(map(len, unknown)) > self._limit:
            networks = unknown
        most = max(map(len, networks))
        return (clients for clients in networks if len(clients) == most)

    def pause(self, client: UnauthenticatedConnection, now: float) -> None:
        """Stop the countdown to a connection's deadline until `resume`."""
        with self._lock:
            if client in self._timed:
                del self._timed[client]
                client.deadline -= now

    def resume(self, client: UnauthenticatedConnection, now: float) -> None:
        """Continue the countdown to a connection's deadline, with the time that was left at `pause`."""
        with self._lock:
            client.deadline += now
            self._timed[client] = None

    def remove(self, client: UnauthenticatedConnection) -> None:
        """Remove a connection that has authenticated or ended. Does nothing if the connection was removed before."""
        with self._lock:
            if client not in self._present:
                return
            del self._present[client]
            self._timed.pop(client, None)
            clients = self._by_network[client.network]
            del clients[client]
            if not clients:
                del self._by_network[client.network]

    def all(self) -> list[UnauthenticatedConnection]:
        with self._lock:
            return list(self._present)

    def late(self, now: float) -> list[UnauthenticatedConnection]:
        """The connections whose deadline has passed; each is returned once."""
        with self._lock:
            late = [client for client in self._timed if client.deadline <= now]
            for client in late:
                del self._timed[client]
        return late

    @property
    def next_deadline(self) -> float:
        """The next deadline; infinity if no connection's time runs."""
        with self._lock:
            return min((client.deadline for client in self._timed), default=math.inf)


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
        greeting_s: float,  # for a client's part of the greeting
        greet: Callable[[UnauthenticatedConnection], P],
        serve: Callable[[UnauthenticatedConnection, P], None],
        share: Callable[[], float] = lambda: SHARE,  # of one core, for accepting and greeting
        authenticates: bool = False,  # a greeted client has authenticated
    ) -> None:
        self._greeting_s, self._greet, self._serve = greeting_s, greet, serve
        self._share, self._authenticates = share, authenticates
        self._places = UnauthenticatedConnections(limit)
        self._processor_time = TokenBucket(per_s=share(), burst=share(), now=time.monotonic())
        # the clients that wait for a turn: of networks from which a client has authenticated, and of all others
        self._known: RoundRobin[str, UnauthenticatedConnection] = RoundRobin()
        self._others: RoundRobin[str, UnauthenticatedConnection] = RoundRobin()
        self._others_turn = False
        self._authenticated: OrderedDict[str, float] = OrderedDict()  # time of the last authentication, by network
        self._outcomes: Counter[str] = Counter()
        self._since: dict[UnauthenticatedConnection, float] = {}  # start of the wait for a turn
        self._waited_s = self._seconds = self._used = 0.0
        self._paused_until = 0.0  # nothing is accepted until then, because the share is used up; 0 without a pause
        self._threads: dict[UnauthenticatedConnection, threading.Thread] = {}
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
        present, waiting, ended = len(self._places), len(self._since), dict(self._outcomes)
        return Handshakes(present=present, waiting=waiting, seconds=self._seconds, waited_s=self._waited_s, **ended)

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

    def _run(self) -> None:
        with self._selector, self._listener, self._wake:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._wake, selectors.EVENT_READ)
            self._used = time.thread_time()
            while not self.stopping.is_set():
                now = time.monotonic()
                self._pause(now)
                until = deadline = self._places.next_deadline
                if self._since or self._paused_until:
                    until = min(deadline, self._paused_until)
                pause_s = max(0.0, until - now) if until < math.inf else None
                ready = [key for key, _ in self._selector.select(pause_s)]
                for client in (key.data for key in ready if key.data is not None):
                    self._selector.unregister(client.socket)
                    self._queue_of(client).put(client.network, client)
                    self._since[client] = now = time.monotonic()
                    self._places.pause(client, now)
                if any(key.fileobj is self._listener for key in ready):
                    self._attempt(self._accept)
                steps = 0 if self._paused_until else min(_AT_ONCE, len(self._since))
                for _ in range(steps):  # at least one, however many connections were accepted
                    self._attempt(self._step)
                    if self._delay(time.monotonic()):
                        break
                if (now := time.monotonic()) >= deadline:
                    for client in self._places.late(now):
                        self._drop(client, "late")
            for client in self._places.all():
                if client not in self._threads:
                    self._drop(client, "late")

    def _delay(self, now: float) -> float:
        """Charge what this thread has done. Returns the seconds until the share allows more."""
        before, self._used, share = self._used, time.thread_time(), self._share()
        self._processor_time.take(self._used - before)
        self._seconds += self._used - before
        self._processor_time.change(per_s=share, burst=share)
        return self._processor_time.delay(now)

    def _pause(self, now: float) -> None:
        """Accept nothing and greet nobody while the share is used up. A pause also saves some time: otherwise waking up
        for a moment could use up the whole share."""
        if now < self._paused_until:
            return
        delay, paused = self._delay(now), self._paused_until > 0
        self._paused_until = now + delay + _SAVED_S / self._share() if delay else 0.0
        if paused and not delay:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif delay and not paused:
            self._selector.unregister(self._listener)
            if self._since:
                address, count = max((self._known, self._others), key=len).longest
                log.often("handshakes_wait", address=address, waiting=count, share=self._share())

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
            try:
                raw.setblocking(False)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                deadline = time.monotonic() + self._greeting_s
                client = UnauthenticatedConnection(raw, peer[0], deadline=deadline)
                client.known = time.monotonic() < self._authenticated.get(client.network, -math.inf) + _KNOWN_S
                self._selector.register(raw, selectors.EVENT_READ, client)
            except BaseException:
                raw.close()
                raise
            if (crowded_out := self._places.add(client)) is not None:
                log.often("handshake_dropped", address=crowded_out.network)
                self._drop(crowded_out, "crowded_out")

    def _drop(self, client: UnauthenticatedConnection, outcome: str) -> None:
        with self._lock:
            thread = self._threads.get(client)
        if thread is not None:  # the thread closes its connection
            self._end(client, outcome)
            shut(client.socket)
            thread.join(self._greeting_s)
            return
        if self._queue_of(client).remove(client.network, client):
            del self._since[client]
        else:
            with contextlib.suppress(KeyError, ValueError):  # its thread has just ended
                self._selector.unregister(client.socket)
        self._end(client, outcome)
        client.socket.close()

    def _end(self, client: UnauthenticatedConnection, outcome: str) -> None:
        """Forget a connection that has authenticated or failed, and count its outcome."""
        self._places.remove(client)
        self._outcomes[outcome] += 1

    # Greetings

    def _queue_of(self, client: UnauthenticatedConnection) -> RoundRobin[str, UnauthenticatedConnection]:
        return self._known if client.known else self._others

    def _step(self) -> None:
        """Make one step of the next greeting. The two queues take turns."""
        queues = [self._others, self._known] if self._others_turn else [self._known, self._others]
        queue = next(filter(None, queues), None)
        if queue is None:  # the other clients were dropped
            return
        client, self._others_turn = queue.get(), queue is self._known
        self._waited_s += time.monotonic() - self._since.pop(client)
        try:
            if client.stream is None and not client.socket.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError
            client.silent = False
            peer = self._greet(client)
        except TimeoutError:
            waits_to_send = client.stream is not None and client.stream.unsent
            self._selector.register(
                client.socket, selectors.EVENT_WRITE if waits_to_send else selectors.EVENT_READ, client
            )
            self._places.resume(client, time.monotonic())
            return
        except BaseException as error:
            self._end(client, "refused")
            client.socket.close()
            if not isinstance(error, OSError | SymbiosisError) or getattr(error, "errno", None) in _EXHAUSTED:
                raise
            log.often("handshake_refused", reason=getattr(error, "reason", None) or type(error).__name__)
            return
        if self._authenticates:
            self._end(client, "accepted")
            self._authenticated[client.network] = time.monotonic()
            self._authenticated.move_to_end(client.network)
            if len(self._authenticated) > _KNOWN:
                self._authenticated.popitem(last=False)
        thread = threading.Thread(target=self._run_client, args=(client, peer), name="connection", daemon=True)
        with self._lock:
            self._threads[client] = thread
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
        self._places.remove(client)
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
