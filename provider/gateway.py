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

import select
import socket
import ssl
import threading
import time
from collections import Counter

from provider import logs
from provider.admission import ByteBudget, Refusal, Register
from provider.config import ProviderConfig
from provider.connection import Connection, Service, refuse
from provider.link import Link, hang_up
from provider.supervisor import ExecutorClient, ExecutorHandle
from symbiosis_priv.errors import CertificateError, ConfigError, ProtocolError, TransportError
from symbiosis_priv.federation import parse_address
from symbiosis_priv.manifest import Manifest
from symbiosis_priv.tls import TenantIdentity, tenant_identity

log = logs.EventLog(__name__)

_BACKLOG = 128
_PAUSE_S = 0.1  # when the machine is out of descriptors or threads


class Gateway:
    """Listens, and serves every connection until stopped.

    Args:
        config: limits and roles.
        manifest: what is served.
        context: TLS, from `tls.server_context`.
        executor: who computes.
    """

    def __init__(
        self, config: ProviderConfig, *, manifest: Manifest, context: ssl.SSLContext, executor: ExecutorHandle
    ) -> None:
        self._limits = config.limits
        self._context = context
        self._executor = executor
        self._service = Service(
            config=config,
            manifest=manifest,
            digest=manifest.digest,
            budget=ByteBudget(config.limits),
            register=Register(config.limits),
            started=time.monotonic(),
        )
        self._lock = threading.Lock()
        self._handshakes: dict[ssl.SSLSocket, str] = {}  # the peer's host, in order of arrival
        self._threads: dict[threading.Thread, ssl.SSLSocket] = {}
        self._listener = _listen(config.listen)
        self._wake, self._waker = socket.socketpair()
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)

    @property
    def requests(self) -> int:
        """Products served, to all tenants."""
        return self._service.register.requests

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self) -> None:
        """Begin to accept."""
        self._acceptor.start()

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
        while True:
            ready, _, _ = select.select([self._listener, self._wake], [], [])
            if self._wake in ready:
                return
            try:
                self._admit()
            except (OSError, RuntimeError) as error:  # out of descriptors or threads, or the client is gone again
                log.warning("accept_failed", error=type(error).__name__)
                select.select([self._wake], [], [], _PAUSE_S)

    def _admit(self) -> None:
        raw, peer = self._listener.accept()
        with raw:  # closed here unless TLS took it over
            raw.settimeout(self._limits.handshake_timeout_s)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = self._context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=self._run, args=(connection,), name="connection", daemon=True)
        with self._lock:
            if len(self._handshakes) >= self._limits.max_handshakes:
                self._drop_stranger()
            self._handshakes[connection] = peer[0]
            self._threads[thread] = connection
        try:
            thread.start()
        except RuntimeError:
            self._forget(thread, connection)
            connection.close()
            raise

    def _drop_stranger(self) -> None:
        busiest, _ = Counter(self._handshakes.values()).most_common(1)[0]
        oldest = next(c for c, host in self._handshakes.items() if host == busiest)
        del self._handshakes[oldest]  # now, not when its thread ends: the next one to come drops another
        hang_up(oldest, socket.SHUT_RDWR)

    # A connection's thread

    def _run(self, connection: ssl.SSLSocket) -> None:
        link = Link(connection)
        try:
            tenant = self._handshake(connection)
            if tenant is not None:
                log.info("connection_opened", tenant=str(tenant))
                log.info("connection_closed", tenant=str(tenant), reason=self._serve(link, tenant))
        except Exception as error:  # a bug must not take the provider with it
            log.failure("connection_failed", error)
        finally:
            link.close()
            self._forget(threading.current_thread(), connection)

    def _handshake(self, connection: ssl.SSLSocket) -> TenantIdentity | None:
        """Who the tenant is; None if this is nobody we serve."""
        try:
            connection.do_handshake()  # the socket's timeout covers all of it
            return tenant_identity(connection)
        except (OSError, CertificateError) as error:
            log.info("handshake_refused", reason=getattr(error, "reason", None) or type(error).__name__)
            return None
        finally:
            with self._lock:
                self._handshakes.pop(connection, None)

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

    def _forget(self, thread: threading.Thread, connection: ssl.SSLSocket) -> None:
        with self._lock:
            self._handshakes.pop(connection, None)
            self._threads.pop(thread, None)


def _listen(address: str) -> socket.socket:
    host, port = parse_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)[0][4]
        return socket.create_server(found, family=family, backlog=_BACKLOG)
    except (OSError, ValueError) as error:  # the latter for hosts that are no names at all
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"listen = {address!r}: {reason}; choose another address") from error
