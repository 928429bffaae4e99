"""Accepts connections, makes their TLS handshakes, and hands each connection over once its tenant is known.

Theory of operation. One thread accepts connections and makes their handshakes, one step at a time, and never waits for
a client. The thread reads what a client has sent when it is that network's turn (`RoundRobin`) and when handshakes have
used less than their share of one core (`TokenBucket`). So handshakes take no more than that share, however many clients
connect. Before a client has authenticated, it has no thread, only a place among the `unauthenticated` connections. A
client that takes longer than `handshake_timeout_s` is dropped; its waits for a turn do not count. If there are too many
clients, the oldest client of the network with the most clients is dropped.

The share is smaller while products are computed: each handshake leads to a connection with a thread and frames, which
use the cores that connected tenants wait for. While no products are computed, many clients can connect at once.

Finding the tenant that a certificate names takes a quarter of a handshake's time, so the result is cached until the
authorities change. TLS sessions are not resumed: in OpenSSL, resuming takes 95 % of the time of a handshake or more.
"""

import errno
import select
import selectors
import socket
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

import msgspec

from provider import logs
from provider.config.schema import Limits
from provider.fairness.round_robin import RoundRobin
from provider.fairness.token_bucket import TokenBucket
from provider.gateway.credentials import AuthenticatedPeer, Credentials
from provider.gateway.unauthenticated import UnauthenticatedConnection, UnauthenticatedConnections
from symbiosis_priv.errors import CertificateError
from symbiosis_priv.network.addresses import bound_address, listen
from symbiosis_priv.network.stream import FrameStream

log = logs.EventLog(__name__)

_BACKLOG = 1024
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.1  # when the machine is out of descriptors or threads
_REMEMBERED = 1024  # certificates whose tenant is cached
_SERVING_S = 1.0  # a provider without a product for this time is idle


class Handshakes(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of handshakes since the start, by outcome.

    Args:
        present: clients that have not authenticated yet.
        waiting: unauthenticated clients that have sent something and wait for their turn.
        accepted: clients that have authenticated.
        refused: clients that showed no good certificate, broke the protocol, or left.
        late: clients that did not finish in time.
        crowded_out: clients that were dropped because their network had too many.
        seconds: processor time of all handshakes.
        waited_s: time that all clients together have waited for their turns.
    """

    present: int
    waiting: int
    accepted: int
    refused: int
    late: int
    crowded_out: int
    seconds: float
    waited_s: float


class Reception:
    """Accepts and authenticates connections; see the module docstring.

    Args:
        address: `host:port` to listen at.
        limits: limits of connections that are not authenticated.
        welcome: takes over an authenticated connection, without waiting. The connection is closed if it raises.
        last_request: returns the time of the last answered product, by `time.monotonic`.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        limits: Limits,
        credentials: Credentials,
        welcome: Callable[[FrameStream, AuthenticatedPeer], None],
        last_request: Callable[[], float],
    ) -> None:
        self._timeout_s = limits.handshake_timeout_s
        self._credentials = credentials
        self._welcome = welcome
        self._last_request = last_request
        self._share = limits.share_of_handshakes
        self._unauthenticated = UnauthenticatedConnections(limits.max_handshakes)
        share = self._share(serving=False)
        self._processor_time = TokenBucket(per_s=share, burst=share, now=time.monotonic())
        self._queue: RoundRobin[str, UnauthenticatedConnection] = RoundRobin()  # by network
        self._identified_peers: OrderedDict[tuple[ssl.SSLContext, bytes], AuthenticatedPeer] = OrderedDict()
        self._outcomes: Counter[str] = Counter()
        self._since: dict[UnauthenticatedConnection, float] = {}  # start of the wait for a turn
        self._waited_s = self._seconds = 0.0
        self._paced = False
        self._stopping = threading.Event()
        self._listener = listen(address, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="reception", daemon=True)

    @property
    def address(self) -> str:
        """The bound address, as `host:port`."""
        return bound_address(self._listener)

    @property
    def handshakes(self) -> Handshakes:
        """Counts of handshakes. Thread-safe."""
        return Handshakes(
            present=len(self._unauthenticated),
            waiting=len(self._since),
            accepted=self._outcomes["accepted"],
            refused=self._outcomes["refused"],
            late=self._outcomes["late"],
            crowded_out=self._outcomes["crowded_out"],
            seconds=self._seconds,
            waited_s=self._waited_s,
        )

    def start(self) -> None:
        self._thread.start()

    def renew(self, limits: Limits, credentials: Credentials) -> None:
        """Apply new limits and credentials to later handshakes."""
        self._share = limits.share_of_handshakes
        self._credentials = credentials
        self._identified_peers = OrderedDict()  # drops the cache of the previous authorities, and their context

    def stop(self, timeout: float) -> None:
        """Stop accepting, and drop the connections that have not authenticated."""
        self._stopping.set()
        self._waker.close()  # the other end becomes readable, and stays so
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        with self._selector, self._listener, self._wake:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._wake, selectors.EVENT_READ)
            while not self._stopping.is_set():
                ready = [key for key, _ in self._selector.select(self._patience())]
                for key in ready:
                    if key.data is not None:
                        self._enqueue(key.data)
                if any(key.fileobj is self._listener for key in ready):
                    self._attempt(self._accept)
                self._attempt(self._run_next_step)
                for client in self._unauthenticated.late(time.monotonic()):
                    self._drop(client, "late")
            for client in self._unauthenticated.all():
                self._drop(client, "late")

    def _patience(self) -> float | None:
        """Seconds until the next turn or the next deadline; None without either."""
        now, deadline = time.monotonic(), self._unauthenticated.next_deadline
        times = [] if deadline is None else [max(0.0, deadline - now)]
        if self._queue:
            times.append(self._delay(now))
        return min(times, default=None)

    def _attempt(self, step: Callable[[], None]) -> None:
        """Run a step that can fail because the machine lacks resources or because the client has left."""
        try:
            step()
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) or error.errno in _EXHAUSTED:
                log.often("accept_failed", error=type(error).__name__)
                select.select([self._wake], [], [], _PAUSE_S)
        except Exception as error:  # a bug must not stop the reception
            log.failure("handshake_failed", error)

    def _accept(self) -> None:
        raw, peer = self._listener.accept()
        try:
            raw.setblocking(False)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = UnauthenticatedConnection(raw, peer[0], deadline=time.monotonic() + self._timeout_s)
            self._selector.register(raw, selectors.EVENT_READ, client)
        except BaseException:
            raw.close()
            raise
        if (crowded_out := self._unauthenticated.add(client)) is not None:
            log.often("handshake_dropped", address=crowded_out.network)
            self._drop(crowded_out, "crowded_out")

    def _drop(self, client: UnauthenticatedConnection, outcome: str) -> None:
        if self._queue.remove(client.network, client):
            del self._since[client]
        else:
            self._selector.unregister(client.socket)
        self._end(client, outcome)
        client.socket.close()

    def _end(self, client: UnauthenticatedConnection, outcome: str) -> None:
        """Forget a connection that has authenticated or failed, and count its outcome."""
        self._unauthenticated.remove(client)
        self._outcomes[outcome] += 1

    # Handshakes

    def _delay(self, now: float) -> float:
        """Seconds until the next turn, by the current share."""
        share = self._share_now(now)
        self._processor_time.change(per_s=share, burst=share)
        return self._processor_time.delay(now)

    def _share_now(self, now: float) -> float:
        return self._share(serving=now - self._last_request() < _SERVING_S)

    def _enqueue(self, client: UnauthenticatedConnection) -> None:
        self._selector.unregister(client.socket)
        self._queue.put(client.network, client)
        self._since[client] = now = time.monotonic()
        self._unauthenticated.pause(client, now)

    def _watch(self, client: UnauthenticatedConnection, events: int) -> None:
        """Wait until the client has sent or read something."""
        self._selector.register(client.socket, events, client)
        self._unauthenticated.resume(client, time.monotonic())

    def _run_next_step(self) -> None:
        """Run one step of the next handshake, if the share allows it."""
        now = time.monotonic()
        if not self._queue:
            self._paced = False
        elif self._delay(now):
            if not self._paced:
                self._paced = True
                address, waiting = self._queue.longest
                log.often("handshakes_wait", address=address, waiting=waiting, share=self._share_now(now))
        else:
            client, begun = self._queue.get(), time.thread_time()
            self._waited_s += now - self._since.pop(client)
            try:
                self._step(client)
            finally:
                seconds = time.thread_time() - begun
                self._processor_time.take(seconds)
                self._seconds += seconds

    def _step(self, client: UnauthenticatedConnection) -> None:
        try:
            if (stream := client.stream) is None:
                if not client.socket.recv(1, socket.MSG_PEEK):
                    raise ConnectionResetError
                stream = FrameStream(client.socket, self._credentials.context)
                self._unauthenticated.mark_active(client, stream)
            stream.handshake(0.0)
            peer = self._identified(stream.tls)
        except TimeoutError:
            waits_to_send = client.stream is not None and client.stream.unsent
            self._watch(client, selectors.EVENT_WRITE if waits_to_send else selectors.EVENT_READ)
            return
        except BaseException as error:
            self._end(client, "refused")
            client.socket.close()
            if not isinstance(error, OSError | CertificateError) or getattr(error, "errno", None) in _EXHAUSTED:
                raise
            log.often("handshake_refused", reason=getattr(error, "reason", None) or type(error).__name__)
            return
        self._end(client, "accepted")
        try:
            self._welcome(stream, peer)
        except BaseException:
            stream.close()
            raise

    def _identified(self, connection: ssl.SSLObject) -> AuthenticatedPeer:
        """The client that a connection's verified certificate names. Cached per TLS context."""
        key = connection.context, connection.getpeercert(binary_form=True) or b""
        peer = self._identified_peers.pop(key, None) or self._credentials.identify(connection)
        self._identified_peers[key] = peer
        if len(self._identified_peers) > _REMEMBERED:
            self._identified_peers.popitem(last=False)
        return peer
