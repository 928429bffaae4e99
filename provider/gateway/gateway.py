"""The gateway: authenticates tenants with TLS, and serves each connection in its own thread.

Theory of operation. Each connection has a thread that blocks in TLS reads, which is faster than asyncio
(docs/adr/9-lane.md), and a slow client delays only its own thread. `listener` starts no thread before the tenant has
authenticated. `connection` parses what tenants send. No exception leaves a thread.

Finding the tenant that a certificate names takes a quarter of a handshake's time, so the result is cached until the
authorities change. TLS sessions are not resumed: in OpenSSL, resuming takes 95 % of the time of a handshake or more.
"""

import contextlib
import ssl
import threading
from collections import OrderedDict

from provider import logs
from provider.config.schema import ProviderConfig
from provider.executor.client import ExecutorHandle, ExecutorRequester
from provider.gateway.connection import Connection
from provider.gateway.credentials import AuthenticatedPeer, Credentials
from provider.gateway.frames import GatewayState, refuse
from provider.gateway.listener import Listener, UnauthenticatedConnection
from provider.gateway.usage import UsageCounters
from provider.refusal import Refusal
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.errors import ProtocolError, TransportError
from symbiosis_priv.network.stream import FrameStream, shut

log = logs.EventLog(__name__)

MAX_HANDSHAKES = 1024
"""Connections that have not authenticated; one more closes the oldest of the busiest network."""
HANDSHAKE_TIMEOUT_S = 10.0
"""Time for a client's part of the TLS handshake."""
_REMEMBERED = 1024  # certificates whose tenant is cached


class Gateway:
    """Listens, and serves every connection until stopped."""

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
        self._credentials = credentials
        self._executor = executor
        self.state = GatewayState(config, manifest, served, usage)
        self.listener = Listener(
            config.listen,
            limit=MAX_HANDSHAKES,
            greeting_s=HANDSHAKE_TIMEOUT_S,
            greet=self._identified,
            serve=self._run,
            authenticates=True,
        )
        self._identified_peers: OrderedDict[tuple[ssl.SSLContext, bytes], AuthenticatedPeer] = OrderedDict()
        self._lock = threading.Lock()
        self.peers: dict[FrameStream, AuthenticatedPeer] = {}  # the authenticated connections

    def accept(self, credentials: Credentials) -> None:
        """Accept clients by these credentials from now on. Closes the connections of clients that are not accepted any
        more."""
        with self._lock:
            self._credentials = credentials
            self._identified_peers = OrderedDict()  # drops the cache of the previous authorities, and their context
            refused = [(stream, peer) for stream, peer in self.peers.items() if credentials.refusal(peer)]
        for stream, peer in refused:
            log.warning("hung_up_on", tenant=str(peer.tenant), reason="revoked")
            shut(stream.raw)

    def stop(self, timeout: float) -> bool:
        """Stop accepting, finish the requests in flight, and close. Returns True if every thread has ended."""
        self.state.stopping.set()
        return self.listener.stop(timeout)

    # The listener's thread

    def _identified(self, client: UnauthenticatedConnection) -> AuthenticatedPeer:
        """Make a step of the handshake. Returns the client that its verified certificate names, cached by context."""
        connection = client.handshake(self._credentials.context).tls
        key = connection.context, connection.getpeercert(binary_form=True) or b""
        peer = self._identified_peers.pop(key, None) or self._credentials.identify(connection)
        self._identified_peers[key] = peer
        if len(self._identified_peers) > _REMEMBERED:
            self._identified_peers.popitem(last=False)
        return peer

    # A connection's thread

    def _run(self, client: UnauthenticatedConnection, peer: AuthenticatedPeer) -> None:
        stream = client.stream
        assert stream is not None
        log.often("connection_opened", tenant=str(peer.tenant))
        reason = "left"
        try:
            self._serve(stream, peer)
        except Refusal as refusal:
            reason = refusal.code
            with contextlib.suppress(OSError, TransportError):
                refuse(stream, refusal, timeout=HANDSHAKE_TIMEOUT_S)
        except TimeoutError:  # the connection was idle or too slow
            reason = "timeout"
        except (OSError, TransportError):
            reason = "lost"
        except ProtocolError:
            reason = "broken_frame"
        finally:
            with self._lock:
                self.peers.pop(stream, None)
        log.often("connection_closed", tenant=str(peer.tenant), reason=reason)

    def _serve(self, stream: FrameStream, peer: AuthenticatedPeer) -> None:
        """Serve until the connection ends. Raises `Refusal` if the client is not accepted, or there is no slot."""
        tenant, state = peer.tenant, self.state

        def close() -> None:
            log.often("connection_closed_for_another_tenant", tenant=str(tenant))
            shut(stream.raw)

        def refusal() -> Refusal | None:
            return self._credentials.refusal(peer)  # a reload replaces them

        with self._lock:
            if refused := refusal():
                raise refused  # `accept` must not close a connection that is sent its refusal
            self.peers[stream] = peer
        state.register.count_visit(tenant)
        with state.slots.taken(tenant, close) as slot, ExecutorRequester(self._executor) as executor:
            Connection(stream, tenant=tenant, state=state, executor=executor, slot=slot, refusal=refusal).serve()
