"""A registry's server: TLS 1.3, one thread for each connection, and a limit for everything that a client can allocate.

Clients do not authenticate, so connections and requests are limited by network (`provider.gateway.listener`):
many clients in one network do not block the clients of other networks. A descriptor is stored only if it passes
`descriptor.verify`, is newer than the stored one, and the executor shows its certificate at the address that it
announces. The announcements of each key are limited, and so is the number of executors.

Nobody can use the registry to look into networks: it connects once for each new and correctly signed descriptor within
the rate of its key, to a host that the authority has certified, in the kind of network that the announcement came from
(`ways_back`). It sends no frame, and its refusal does not tell what it has found.
"""

import contextlib
import functools
import ssl
import threading
import time
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Any, Final, Self

import msgspec

from provider import logs
from provider.config.reload import Reloader
from provider.fairness import TokenBucket
from provider.gateway.listener import Listener, UnauthenticatedConnection
from provider.refusal import Refusal
from provider.registry import RegistryConfig
from provider.registry.store import Store
from symbiosis_priv.certificates.reading import load_certificates
from symbiosis_priv.errors import CertificateError, DescriptorError, ProtocolError, TransportError
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import ways_back
from symbiosis_priv.network.dial import ClientConnection
from symbiosis_priv.network.stream import FrameStream
from symbiosis_priv.network.tls import registry_client_context, registry_server_context
from symbiosis_priv.registry import protocol
from symbiosis_priv.registry.descriptor import MAX_BYTES, MS, Trust, VerifiedDescriptor, verify

log = logs.EventLog(__name__)

_CONNECT_S: Final = 3.0  # the announcer waits ten seconds for its reply
_TOO_MANY: Final[protocol.Reply] = wire.Failure(code=wire.ErrorCode.BUSY, detail="too many requests from this network")


class RegistryServer:
    """A registry that listens and answers until it is stopped.

        with RegistryServer(config) as registry:
            connect_to(registry.address)

    Raises `CertificateError`: a certificate, key or list cannot be used; `ConfigError`: the address cannot."""

    def __init__(self, config: RegistryConfig) -> None:
        self.config = config
        files = (config.certificate, config.key, config.authority, config.revoked)
        self._reloader = Reloader(lambda: filter(None, files), self._reload)
        self._context, self._trust = _load(config)
        self._requests = Rates(per_s=config.requests_per_s, burst=10 * config.requests_per_s)
        per_h = config.announcements_per_h
        self._announcements = Rates(per_s=per_h / 3600, burst=max(1.0, per_h / 4))
        self.store = Store()
        self._listener = Listener(
            config.listen,
            limit=config.max_connections,
            greeting_s=config.frame_timeout_s,
            greet=lambda client: client.handshake(self._context),
            serve=self._serve,
        )

    @property
    def address(self) -> str:
        return self._listener.address

    def start(self) -> Self:
        self._listener.start()
        self._reloader.periodic.start()
        log.info("registry_started", address=self.address)
        return self

    def stop(self) -> None:
        """Close the connections; returns within twice `frame_timeout_s`."""
        self._reloader.periodic.close(self.config.frame_timeout_s)
        self._listener.stop(self.config.frame_timeout_s)
        log.info("registry_stopped")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _reload(self) -> None:
        """Read the files again, and drop the descriptors of certificates that are not trusted any more."""
        self._context, self._trust = _load(self.config, revoked=self._trust.revoked)

        def is_trusted(one: VerifiedDescriptor) -> bool:
            with contextlib.suppress(DescriptorError):
                return bool(verify(one.data, self._trust, now=one.descriptor.issued / MS))
            return False

        log.info("reloaded", dropped=self.store.drop_unless(is_trusted))

    # A connection's thread

    def _serve(self, client: UnauthenticatedConnection, stream: FrameStream) -> None:
        end, allowed = time.monotonic() + self.config.connection_s, True
        with contextlib.suppress(OSError, TransportError, ProtocolError):
            # a client above its limit is disconnected: refusing each of its requests would delay others
            while allowed and not self._listener.stopping.is_set():
                if not stream.begin(deadline=min(time.monotonic() + self.config.frame_timeout_s, end)):
                    return
                deadline = time.monotonic() + self.config.frame_timeout_s
                head, size = stream.receive_head(max_payload=MAX_BYTES, deadline=deadline)
                header, payload = bytes(head), bytearray(size)
                stream.receive(memoryview(payload), deadline=deadline)
                reply, body = _TOO_MANY, b""
                if allowed := self._requests.take(client.network, now=time.monotonic()):
                    reply, body = self._reply(protocol.decode_request(header), bytes(payload), client.host)
                stream.send_frame(wire.encode(reply, payload_bytes=len(body)), memoryview(body), deadline=deadline)

    def _reply(self, request: protocol.Request, payload: bytes, peer: str) -> tuple[protocol.Reply, bytes]:
        if isinstance(request, protocol.Announce):
            return self._take(payload, peer), b""
        return protocol.Listed(), msgspec.msgpack.encode(self.store.listed(request.model_digest, now=time.time()))

    def _take(self, data: bytes, peer: str) -> protocol.Reply:
        now, trust = time.time(), self._trust
        try:
            new = verify(data, trust, now=now)
            if not self.store.holds(new):  # anybody can repeat what is listed
                if not self._announcements.take(new.key, now=time.monotonic()):
                    raise Refusal(wire.ErrorCode.BUSY, "this executor announces itself too often")
                if not new.descriptor.draining:
                    self._connect_back(new, trust, peer)
                self.store.put(new, now=now, admit=functools.partial(self._admit, trust))
        except (DescriptorError, Refusal) as error:
            log.often("announcement_refused", reason=str(error))
            code = error.code if isinstance(error, Refusal) else wire.ErrorCode.REFUSED
            return wire.Failure(code=code, detail=str(error))
        log.often("announced", provider=new.name, layers=str(new.descriptor.layers))
        return protocol.Accepted()

    def _admit(self, trust: Trust) -> None:
        if trust is not self._trust:  # a descriptor that a reload has just dropped must not be stored again
            raise DescriptorError("the registry has read its files again: announce it again")

    def _connect_back(self, new: VerifiedDescriptor, trust: Trust, peer: str) -> None:
        """Raises `Refusal` unless an executor shows the descriptor's certificate at its address."""
        at, context = new.descriptor, registry_client_context(trust.authorities)
        how: dict[str, Any] = {
            "pins": (new.certificate,),
            "context": context,
            "choose": functools.partial(ways_back, peer=peer),
        }
        try:
            with ClientConnection(new.name, host=at.host, port=at.port, **how) as connection:
                connection.open(time.monotonic() + _CONNECT_S)
        except (CertificateError, TransportError) as error:
            raise Refusal(wire.ErrorCode.UNREACHABLE, "the registry does not find it at its address") from error


def _load(config: RegistryConfig, *, revoked: frozenset[str] = frozenset()) -> tuple[ssl.SSLContext, Trust]:
    """Read the files. Raises `CertificateError` also if the authority has not issued the registry's certificate."""
    context = registry_server_context(certificate=config.certificate, key=config.key)
    trust = Trust.load(config.authority, config.revoked, known=revoked)
    try:
        trust.check(load_certificates(config.certificate)[0], at=datetime.now(UTC))
    except DescriptorError as error:
        raise CertificateError(
            f"{config.certificate} cannot be a registry's: {error}. Ask for one with `symbiosis-priv keys request "
            f"--provider`, and have it signed by {config.authority}"
        ) from error
    return context, trust


class Rates:
    """A token bucket for each of the `most` most recent clients; a new one is full. Thread-safe."""

    def __init__(self, *, per_s: float, burst: float, most: int = 4096) -> None:
        self._per_s = per_s
        self._burst = burst
        self._most = most
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, client: str, *, now: float) -> bool:
        """Take a token from the client's bucket. Returns False if there is none. `now` is on a monotonic clock."""
        with self._lock:
            bucket = self._buckets.pop(client, None) or TokenBucket(per_s=self._per_s, burst=self._burst, now=now)
            self._buckets[client] = bucket
            if len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
            if bucket.tokens(now) < 1:
                return False
            bucket.take(1)
            return True
