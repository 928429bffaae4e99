"""The gateway: the only door to the network. TLS, who is asking, and one thread per connection.

Theory of operation. A thread per connection blocks in TLS reads: measured at 55 µs a round trip where asyncio's
TLS takes 90, and a slow client can only ever hold up its own thread. It begins once the tenant has authenticated:
`reception` sees to that. `connection` parses what tenants send; no exception leaves a thread.

To stop, the read side of every connection is shut: a thread that waits for the next frame sees its end, one
that is in the middle of a request finishes it first, and takes no other.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time

from provider import logs
from provider.config.schema import ProviderConfig
from provider.executor.client import ExecutorClient
from provider.executor.envelope import Stages
from provider.executor.handle import ExecutorHandle
from provider.gateway.admission import ByteBudget, Register
from provider.gateway.connection import Connection, Service, refuse
from provider.gateway.credentials import Credentials, Peer
from provider.gateway.link import Link, hang_up
from provider.gateway.quota import QuotaGate
from provider.gateway.reception import Handshakes, Reception
from provider.gateway.slots import Slots
from provider.gateway.usage import Usage
from provider.refusal import Refusal
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.errors import ProtocolError, TransportError

log = logs.EventLog(__name__)


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
            register=Register(),
            slots=Slots(config.limits),
            quotas=QuotaGate(config.quota_of),
            usage=usage,
            stages=Stages(config.scheduler.few_rows),
            started=time.monotonic(),
        )
        self._reception = Reception(
            config.listen,
            limits=config.limits,
            credentials=credentials,
            welcome=self._begin,
            last_request=lambda: self._service.register.last_request,
        )
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, ssl.SSLSocket] = {}
        self._peers: dict[ssl.SSLSocket, Peer] = {}  # those who have authenticated

    @property
    def requests(self) -> int:
        """Products served, to all tenants."""
        return self._service.register.requests

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        return self._reception.address

    def start(self) -> None:
        """Begin to accept."""
        self._reception.start()

    @property
    def service(self) -> Service:
        """What all connections share, to be looked at."""
        return self._service

    @property
    def connections(self) -> int:
        """Of tenants."""
        return len(self._peers)

    @property
    def handshakes(self) -> Handshakes:
        """Of those who connect."""
        return self._reception.handshakes

    def renew(self, config: ProviderConfig, credentials: Credentials) -> None:
        """Take over new quotas, certificates and revocations, and the shares of handshakes; who is not let in any more
        is hung up on.
        """
        self._service.quotas.renew(config.quota_of)
        self._reception.renew(config.limits, credentials)
        with self._lock:
            self._credentials = credentials
            refused = [(socket, peer) for socket, peer in self._peers.items() if credentials.refusal(peer)]
        for connection, peer in refused:
            log.warning("hung_up_on", tenant=str(peer.tenant), reason="revoked")
            hang_up(connection, socket.SHUT_RDWR)

    def stop(self, timeout: float) -> bool:
        """Accept no more, let requests in flight finish, then close; returns whether every thread has ended."""
        deadline = time.monotonic() + timeout
        self._service.stopping.set()
        self._reception.stop(timeout)
        self._hang_up(socket.SHUT_RD)
        self._join(deadline)
        self._hang_up(socket.SHUT_RDWR)  # whoever is still here had its time
        self._join(time.monotonic() + 1.0)
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

    def _begin(self, connection: ssl.SSLSocket, peer: Peer) -> None:
        """A tenant has authenticated: a thread for it."""
        thread = threading.Thread(target=self._run, args=(connection, peer), name="connection", daemon=True)
        with self._lock:
            self._threads[thread] = connection
        try:
            thread.start()
        except RuntimeError:
            self._forget(thread)
            raise

    # A connection's thread

    def _run(self, connection: ssl.SSLSocket, peer: Peer) -> None:
        link = Link(connection)
        try:
            log.often("connection_opened", tenant=str(peer.tenant))
            reason = self._serve_accepted(link, connection, peer)
            log.often("connection_closed", tenant=str(peer.tenant), reason=reason)
        except Exception as error:  # a bug must not take the provider with it
            log.failure("connection_failed", error)
        finally:
            link.close()
            self._forget(threading.current_thread())

    def _serve_accepted(self, link: Link, connection: ssl.SSLSocket, peer: Peer) -> str:
        """Serve somebody who is let in, also by the credentials of this very moment."""
        with self._lock:
            refusal = self._credentials.refusal(peer)
            if refusal is None:  # a tenant that is refused is told so, and not hung up on meanwhile
                self._peers[connection] = peer
        try:
            if refusal is None:
                return self._serve(link, connection, peer)
            with contextlib.suppress(OSError, TransportError):
                refuse(link, refusal, timeout=self._limits.handshake_timeout_s)
            return refusal.code
        finally:
            with self._lock:
                self._peers.pop(connection, None)

    def _serve(self, link: Link, connection: ssl.SSLSocket, peer: Peer) -> str:
        """Serve until the end; returns its reason."""
        tenant = peer.tenant

        def close() -> None:
            log.often("connection_closed_for_another_tenant", tenant=str(tenant))
            hang_up(connection, socket.SHUT_RDWR)

        self._service.register.count_visit(tenant)
        try:
            try:
                with self._service.slots.taken(tenant, close) as slot, ExecutorClient(self._executor) as executor:
                    Connection(
                        link,
                        tenant=tenant,
                        service=self._service,
                        executor=executor,
                        slot=slot,
                        refusal=lambda: self._credentials.refusal(peer),
                    ).serve()
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

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            self._threads.pop(thread, None)
