"""The messages between a registry and its clients, in frames of `wire`, and the client.

    Announce   payload: a signed descriptor   -> Accepted
    List                                      -> Listed    payload: list of signed descriptors
    any request that fails                    -> wire.Failure

Clients show no certificate: descriptors are signed, and every client may read them. So a registry learns a client's
address and the model that the client asks for, but not the client's name.

The registry shows a certificate that the federation's authority has issued for its host. TLS protects requests and
replies on the network. The client does not trust the registry's replies: each descriptor has a signature of its own.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Final, Self

import msgspec
from cryptography import x509

from symbiosis_priv.errors import CertificateError, DescriptorError, ProtocolError, one_line
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.dial import ClientConnection
from symbiosis_priv.network.tls import registry_client_context
from symbiosis_priv.network.wire import Failure, Message
from symbiosis_priv.registry.descriptor import MAX_BYTES, Digest, Trust
from symbiosis_priv.system.files import UNDECODABLE

MAX_LISTED: Final = 1024  # largest number of executors in a registry
MAX_REPLY: Final = MAX_LISTED * (MAX_BYTES + 8)  # size limit of a reply's payload, in bytes


class Announce(Message, frozen=True, tag="announce"):
    """Store a descriptor."""


class List(Message, frozen=True, tag="list"):
    """List the executors of a model, or of all models if it is None."""

    model_digest: Digest | None = None


class Accepted(Message, frozen=True, tag="accepted"):
    """The registry has stored the descriptor."""


class Listed(Message, frozen=True, tag="listed"):
    """The newest descriptor of every executor that has not expired."""


Request = Announce | List
Reply = Accepted | Listed | Failure

decode_request: Callable[[wire.Buffer], Request] = partial(wire.decode, msgspec.msgpack.Decoder(Request))
"""Parse a client's request. Raises `ProtocolError`."""
decode_reply: Callable[[wire.Buffer], Reply] = partial(wire.decode, msgspec.msgpack.Decoder(Reply))
"""Parse a registry's reply. Raises `ProtocolError`."""

_Data = Annotated[bytes, msgspec.Meta(max_length=MAX_BYTES)]
_listing_decoder: msgspec.msgpack.Decoder[list[bytes]] = msgspec.msgpack.Decoder(
    Annotated[list[_Data], msgspec.Meta(max_length=MAX_LISTED)]
)


class RegistryClient:
    """A connection to a registry.

        with RegistryClient("registry.example:7500", trust, deadline_s=5) as registry:
            registry.announce(data)

    One of the authorities in `trust` has issued the registry's certificate. `deadline_s` is for connecting and all
    requests together.
    """

    def __init__(self, address: str, trust: Trust, *, deadline_s: float) -> None:
        self.address, self._trust = address, trust
        context = registry_client_context(trust.authorities)
        host, port = parse_address(address)
        self._connection = ClientConnection(f"registry {address}", host=host, port=port, pins=None, context=context)
        self._deadline_s = deadline_s
        self._deadline = 0.0

    def __enter__(self) -> Self:
        """Connect. Raises `CertificateError`: the server is not a registry of this federation; `TransportError`: the
        registry cannot be reached in time."""
        self._deadline = time.monotonic() + self._deadline_s
        self._connection.open(self._deadline)
        assert self._connection.tls is not None
        shown = self._connection.tls.getpeercert(binary_form=True)
        assert shown is not None  # the handshake has verified it
        try:
            self._trust.check(x509.load_der_x509_certificate(shown), at=datetime.now(UTC))
        except DescriptorError as error:
            self._connection.close()
            raise CertificateError(f"registry {self.address} cannot be used: {error}; ask its operator") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def announce(self, data: bytes) -> None:
        """Send a signed descriptor. Raises `ProviderError`: the registry refuses it; `TransportError`: the connection
        was closed, or the reply did not arrive in time; `ProtocolError`: the reply is malformed."""
        self._ask(Accepted, Announce(), data)

    def list(self, model_digest: str | None = None) -> list[bytes]:
        """Signed descriptors, not verified, of the executors of one model or of all. Raises as `announce`."""
        payload = self._ask(Listed, List(model_digest=model_digest))
        try:
            return _listing_decoder.decode(payload)
        except UNDECODABLE as error:
            raise ProtocolError(f"bad payload: {one_line(str(error))}") from error

    def close(self) -> None:
        """Close the connection without a message. While another thread uses the connection, call `shut` instead."""
        self._connection.close()

    def shut(self) -> None:
        """Make a running request of another thread fail immediately."""
        self._connection.shut()

    def _ask(self, kind: type[Accepted | Listed], request: Request, payload: bytes = b"") -> bytearray:
        _, body = self._connection.expect(
            kind, request, payload, max_payload=MAX_REPLY, deadline=self._deadline, decode=decode_reply
        )
        return body
