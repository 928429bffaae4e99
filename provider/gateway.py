"""The gateway: the only door to the network. TLS, who is asking, and one thread per connection.

Theory of operation. A thread per connection blocks in TLS reads: measured at 55 µs a round trip where asyncio's
TLS takes 90, and a slow client can only ever hold up its own thread. The accept loop does nothing that a client
could delay: the handshake runs in the connection's thread, under one deadline. Connections that have not
authenticated are counted apart, and when they are too many the oldest from the busiest address is dropped, so that
strangers cannot take places from tenants. `connection` parses what tenants send; no exception leaves a thread.

To stop, the read side of every connection is shut: a thread that waits for the next frame sees its end, one
that is in the middle of a request finishes it first, and takes no other.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import select
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable

from provider import logs
from provider.admission import ByteBudget, Refusal, Register
from provider.config import ProviderConfig
from provider.connection import Connection, Service, refuse
from provider.credentials import Credentials, Peer
from provider.link import Link, bound_address, hang_up, listen
from provider.quota import QuotaGate
from provider.strangers import Stranger, Strangers
from provider.supervisor import ExecutorClient, ExecutorHandle
from provider.usage import Usage
from symbiosis_priv.errors import CertificateError, ProtocolError, TransportError
from symbiosis_priv.manifest import Manifest
from symbiosis_priv.tls import TenantIdentity
from symbiosis_priv.wire import ErrorCode

log = logs.EventLog(__name__)

_BACKLOG = 1024
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.1  # when the machine is out of descriptors or threads


class Gateway:
    """Listens, and serves every connection until stopped.

    Args:
        config: limits and roles.
        manifest: what is served.
        credentials: who this provider is, and whom it lets in.
        executor: who computes.
        usage: where it is counted.
    """

    def __init__(
        self,
        config: ProviderConfig,
        *,
        manifest: Manifest,
        served: range,
        credentials: Credentials,
        executor: ExecutorHandle,
        usage: Usage,
    ) -> None:
        self._limits = config.limits
        self._credentials = credentials
        self._executor = executor
        self._service = Service(
            config=config,
            manifest=manifest,
            served=served,
            digest=manifest.digest,
            budget=ByteBudget(config.limits),
            register=Register(config.limits),
            quotas=QuotaGate(config.quota_of),
            usage=usage,
            started=time.monotonic(),
        )
        self._lock = threading.Lock()
        self._strangers = Strangers(config.limits.max_handshakes)
        self._threads: dict[threading.Thread, ssl.SSLSocket] = {}
        self._peers: dict[ssl.SSLSocket, Peer] = {}  # those who have authenticated
        self._listener = listen(config.listen, backlog=_BACKLOG)
        self._wake, self._waker = socket.socketpair()
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)

    @property
    def requests(self) -> int:
        """Products served, to all tenants."""
        return self._service.register.requests

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        return bound_address(self._listener)

    def start(self) -> None:
        """Begin to accept."""
        self._acceptor.start()

    @property
    def service(self) -> Service:
        """What all connections share, to be looked at."""
        return self._service

    @property
    def connections(self) -> int:
        """Of tenants."""
        return len(self._peers)

    @property
    def strangers(self) -> int:
        """Connections that have not authenticated."""
        return len(self._strangers)

    def renew(self, config: ProviderConfig, credentials: Credentials) -> None:
        """Take over new quotas, certificates and revocations; who is not let in any more is hung up on."""
        self._service.quotas.of = config.quota_of
        with self._lock:
            self._credentials = credentials
            refused = [(socket, peer) for socket, peer in self._peers.items() if not credentials.accepts(peer)]
        for connection, peer in refused:
            log.warning("hung_up_on", tenant=str(peer.tenant), reason="revoked")
            hang_up(connection, socket.SHUT_RDWR)

    def stop(self, timeout: float) -> bool:
        """Accept no more, let requests in flight finish, then close; returns whether every thread has ended."""
        deadline = time.monotonic() + timeout
        self._service.stopping.set()
        self._waker.send(b"\0")
        self._acceptor.join(timeout)
        self._listener.close()
        self._hang_up(socket.SHUT_RD)
        self._join(deadline)
        self._hang_up(socket.SHUT_RDWR)  # whoever is still here had its time
        self._join(time.monotonic() + 1.0)
        self._wake.close()
        self._waker.close()
        return not self._threads

    def _hang_up(self, how: int) -> None:
        with self._lock:
            for connection in self._threads.values():
                hang_up(connection, how)

    def _join(self, deadline: float) -> None:
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # The accept loop

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._service.stopping.is_set():
                ready = [key for key, _ in selector.select(self._patience())]
                for stranger in (key.data for key in ready if key.data):
                    selector.unregister(stranger.socket)
                    self._attempt(functools.partial(self._begin, stranger))
                if any(key.fileobj is self._listener for key in ready):
                    self._attempt(functools.partial(self._admit, selector))
                for stranger in self._strangers.late(time.monotonic()):
                    self._drop(stranger, selector)
            for stranger in self._strangers.all():
                self._drop(stranger, selector)

    def _attempt(self, step: Callable[[], None]) -> None:
        """A step that the machine may have no room for, or whose client may be gone again."""
        try:
            step()
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) or error.errno in _EXHAUSTED:
                log.often("accept_failed", error=type(error).__name__)
                select.select([self._wake], [], [], _PAUSE_S)

    def _patience(self) -> float | None:
        """Until the first of the silent ones is late."""
        deadline = self._strangers.next_deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _admit(self, selector: selectors.BaseSelector) -> None:
        raw, peer = self._listener.accept()
        try:
            raw.setblocking(False)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stranger = Stranger(raw, peer[0], deadline=time.monotonic() + self._limits.handshake_timeout_s)
            selector.register(raw, selectors.EVENT_READ, stranger)
        except BaseException:
            raw.close()
            raise
        if (crowded_out := self._strangers.come(stranger)) is not None:
            log.often("stranger_dropped", address=crowded_out.network)
            self._drop(crowded_out, selector)

    def _drop(self, stranger: Stranger, selector: selectors.BaseSelector) -> None:
        self._strangers.leave(stranger)
        if stranger.silent:
            selector.unregister(stranger.socket)
            stranger.socket.close()
        else:
            hang_up(stranger.socket, socket.SHUT_RDWR)  # its thread closes it

    def _begin(self, stranger: Stranger) -> None:
        """It has said something: a thread for it."""
        with stranger.socket as raw:  # closed here unless TLS takes it over
            try:
                if not raw.recv(1, socket.MSG_PEEK):
                    self._strangers.leave(stranger)
                    return
                raw.settimeout(max(1e-3, stranger.deadline - time.monotonic()))
                connection = self._credentials.context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
            except BaseException:
                self._strangers.leave(stranger)
                raise
        self._strangers.speak(stranger, connection)
        thread = threading.Thread(target=self._run, args=(stranger, connection), name="connection", daemon=True)
        with self._lock:
            self._threads[thread] = connection
        try:
            thread.start()
        except RuntimeError:
            self._forget(thread, stranger)
            connection.close()
            raise

    # A connection's thread

    def _run(self, stranger: Stranger, connection: ssl.SSLSocket) -> None:
        link = Link(connection)
        try:
            peer = self._handshake(stranger, connection)
            if peer is not None:
                log.often("connection_opened", tenant=str(peer.tenant))
                reason = self._serve_accepted(link, connection, peer)
                log.often("connection_closed", tenant=str(peer.tenant), reason=reason)
        except Exception as error:  # a bug must not take the provider with it
            log.failure("connection_failed", error)
        finally:
            link.close()
            self._forget(threading.current_thread(), stranger)

    def _handshake(self, stranger: Stranger, connection: ssl.SSLSocket) -> Peer | None:
        """Who the tenant is; None if this is nobody we serve."""
        try:
            connection.do_handshake()  # the socket's timeout covers all of it
            return Peer.of(connection)
        except (OSError, CertificateError) as error:
            log.often("handshake_refused", reason=getattr(error, "reason", None) or type(error).__name__)
            return None
        finally:
            self._strangers.leave(stranger)

    def _serve_accepted(self, link: Link, connection: ssl.SSLSocket, peer: Peer) -> str:
        """Serve somebody who is let in, also by the credentials of this very moment."""
        with self._lock:
            self._peers[connection] = peer
            accepted = self._credentials.accepts(peer)
        try:
            if accepted:
                return self._serve(link, peer.tenant)
            refusal = Refusal(ErrorCode.REVOKED, "this certificate is not accepted any more")
            with contextlib.suppress(OSError, TransportError):
                refuse(link, refusal, timeout=self._limits.handshake_timeout_s)
            return refusal.code
        finally:
            with self._lock:
                del self._peers[connection]

    def _serve(self, link: Link, tenant: TenantIdentity) -> str:
        """Serve until the end; returns its reason."""
        try:
            try:
                with self._service.register.connected(tenant), ExecutorClient(self._executor) as executor:
                    Connection(link, tenant=tenant, service=self._service, executor=executor).serve()
            except Refusal as refusal:
                refuse(link, refusal, timeout=self._limits.frame_timeout_s)
                return refusal.code
        except TimeoutError:  # idle, or too slow
            return "timeout"
        except (OSError, TransportError):
            return "lost"
        except ProtocolError:
            return "broken_frame"
        return "left"

    def _forget(self, thread: threading.Thread, stranger: Stranger) -> None:
        self._strangers.leave(stranger)
        with self._lock:
            self._threads.pop(thread, None)
