"""The gateway: authenticates tenants with TLS, and serves each connection in its own thread.

Theory of operation. Each connection has a thread that blocks in TLS reads: a round trip takes 55 µs, where asyncio's
TLS takes 90 µs, and a slow client delays only its own thread. `reception` starts no thread before the tenant has
authenticated. `connection` parses what tenants send. No exception leaves a thread.

To stop, the gateway shuts the read side of every connection. A thread that waits for the next frame then reads the end
of the connection; a thread that serves a request finishes the request first.
"""

import contextlib
import socket
import threading
import time

from provider import logs
from provider.config.schema import MIB, ProviderConfig
from provider.executor.client import ExecutorHandle, ExecutorRequester
from provider.executor.queues import Stages
from provider.gateway.admission import ByteBudget, Register
from provider.gateway.connection import Connection
from provider.gateway.credentials import AuthenticatedPeer, Credentials, HelperIdentity
from provider.gateway.deposits import DepositConnection
from provider.gateway.frames import GatewayState, refuse
from provider.gateway.quota import QuotaGate
from provider.gateway.reception import Handshakes, Reception
from provider.gateway.slots import Slots
from provider.gateway.usage import UsageCounters
from provider.refusal import Refusal
from provider.relay.blocks import BlockStore
from provider.relay.links import Links
from provider.relay.permits import Permits
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.errors import ProtocolError, TransportError
from symbiosis_priv.network.stream import FrameStream, shut

log = logs.EventLog(__name__)


class Gateway:
    """Listens, and serves every connection until stopped.

    Args:
        served: indices of the layer groups that are served.
        executor: the executor that computes products.
        usage: the counters for the bill.
    """

    def __init__(
        self,
        config: ProviderConfig,
        *,
        manifest: Manifest,
        served: range,
        credentials: Credentials,
        executor: ExecutorHandle,
        usage: UsageCounters,
    ) -> None:
        self._limits = config.limits
        self._credentials = credentials
        self._executor = executor
        self._state = GatewayState(
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
            permits=Permits(credentials.helpers),
            blocks=BlockStore(config.relay.memory_mib * MIB),
            links=Links(config),
            started=time.monotonic(),
        )
        self._reception = Reception(
            config.listen,
            limits=config.limits,
            credentials=credentials,
            welcome=self._begin,
            last_request=lambda: self._state.register.last_request,
        )
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, FrameStream] = {}
        self._peers: dict[FrameStream, AuthenticatedPeer] = {}  # the authenticated connections

    @property
    def requests(self) -> int:
        """Number of products for all tenants."""
        return self._state.register.requests

    @property
    def address(self) -> str:
        """The bound address, as `host:port`."""
        return self._reception.address

    def start(self) -> None:
        self._reception.start()

    @property
    def state(self) -> GatewayState:
        """The state that all connections share, for status and metrics."""
        return self._state

    @property
    def connections(self) -> int:
        """Number of authenticated connections."""
        return len(self._peers)

    @property
    def handshakes(self) -> Handshakes:
        return self._reception.handshakes

    def renew(self, config: ProviderConfig, credentials: Credentials) -> None:
        """Apply new quotas, certificates, revocations, relays and shares for handshakes. Closes the connections of
        clients that are not accepted any more.

        Raises:
            CertificateError: a certificate of a relay cannot be used; nothing has changed.
        """
        self._state.links.renew(config)
        self._state.permits.renew(credentials.helpers)
        self._state.quotas.renew(config.quota_of)
        self._reception.renew(config.limits, credentials)
        with self._lock:
            self._credentials = credentials
            refused = [(stream, peer) for stream, peer in self._peers.items() if credentials.refusal(peer)]
        for stream, peer in refused:
            log.warning("hung_up_on", tenant=str(peer.party), reason="revoked")
            shut(stream.raw)

    def stop(self, timeout: float) -> bool:
        """Stop accepting, finish the requests in flight, and close. Returns True if every thread has ended."""
        deadline = time.monotonic() + timeout
        self._state.stopping.set()
        self._reception.stop(timeout)
        self._shut_all(socket.SHUT_RD)
        self._join(deadline)
        self._shut_all(socket.SHUT_RDWR)  # connections that are still open after the timeout
        self._join(time.monotonic() + 1.0)
        self._state.links.close()
        return not self._threads

    def _shut_all(self, how: int) -> None:
        with self._lock:
            for stream in self._threads.values():
                shut(stream.raw, how)

    def _join(self, deadline: float) -> None:
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _begin(self, stream: FrameStream, peer: AuthenticatedPeer) -> None:
        """Start the thread of an authenticated connection."""
        thread = threading.Thread(target=self._run, args=(stream, peer), name="connection", daemon=True)
        with self._lock:
            self._threads[thread] = stream
        try:
            thread.start()
        except RuntimeError:
            self._forget(thread)
            raise

    # A connection's thread

    def _run(self, stream: FrameStream, peer: AuthenticatedPeer) -> None:
        try:
            log.often("connection_opened", tenant=str(peer.party))
            reason = self._serve_accepted(stream, peer)
            log.often("connection_closed", tenant=str(peer.party), reason=reason)
        except Exception as error:  # a bug must not stop the provider
            log.failure("connection_failed", error)
        finally:
            stream.close()
            self._forget(threading.current_thread())

    def _serve_accepted(self, stream: FrameStream, peer: AuthenticatedPeer) -> str:
        """Serve a client if the current credentials still accept it. Returns the reason of the end."""
        with self._lock:
            certificate = self._credentials.fingerprint
            refusal = self._credentials.refusal(peer)
            if refusal is None:  # `renew` must not close a connection that is sent its refusal
                self._peers[stream] = peer
        try:
            if refusal is None:
                return self._serve(stream, peer, certificate)
            with contextlib.suppress(OSError, TransportError):
                refuse(stream, refusal, timeout=self._limits.handshake_timeout_s)
            return refusal.code
        finally:
            with self._lock:
                self._peers.pop(stream, None)

    def _serve(self, stream: FrameStream, peer: AuthenticatedPeer, certificate: str) -> str:
        """Serve until the connection ends. Returns the reason of the end.

        Args:
            certificate: `fingerprint` of the provider's certificate.
        """
        party = peer.party

        def close() -> None:
            log.often("connection_closed_for_another_tenant", tenant=str(party))
            shut(stream.raw)

        def refusal() -> Refusal | None:
            return self._credentials.refusal(peer)

        self._state.register.count_visit(party)
        try:
            try:
                with self._state.slots.taken(party, close) as slot:
                    if isinstance(party, HelperIdentity):
                        DepositConnection(
                            stream,
                            helper=party,
                            key=peer.key,
                            executor=certificate,
                            state=self._state,
                            slot=slot,
                            refusal=refusal,
                        ).serve()
                        return "left"
                    with ExecutorRequester(self._executor) as executor:
                        Connection(
                            stream, tenant=party, state=self._state, executor=executor, slot=slot, refusal=refusal
                        ).serve()
            except Refusal as reason:
                refuse(stream, reason, timeout=self._limits.frame_timeout_s)
                return reason.code
        except TimeoutError:  # the connection was idle or too slow
            return "timeout"
        except (OSError, TransportError):
            return "lost"
        except ProtocolError:
            return "broken_frame"
        return "left"

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            self._threads.pop(thread, None)
