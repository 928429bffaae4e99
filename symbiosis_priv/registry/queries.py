"""The client of a registry: one connection, several requests, one deadline for all of them.

The registry shows a certificate that the federation's authority has issued for its host. TLS protects requests and
replies on the network. The client does not trust the registry's replies: each descriptor has a signature of its own.
"""

import time
from datetime import UTC, datetime
from typing import Self

from cryptography import x509

from symbiosis_priv.errors import CertificateError, DescriptorError
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.dial import ClientConnection
from symbiosis_priv.network.tls import registry_client_context
from symbiosis_priv.registry import protocol
from symbiosis_priv.registry.trust import Trust


class RegistryClient:
    """A connection to a registry.

        with RegistryClient("registry.example:7500", trust, deadline_s=5) as registry:
            registry.announce(data)

    Args:
        address: `host:port`.
        trust: the authorities of the federation. One of them has issued the registry's certificate.
        deadline_s: time for connecting and all requests together.
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
        self._connection.close()

    def announce(self, data: bytes) -> None:
        """Send a signed descriptor.

        Raises:
            ProviderError: the registry refuses it.
            TransportError: the connection was closed, or the reply did not arrive in time.
            ProtocolError: the reply is malformed.
        """
        self._ask(protocol.Accepted, protocol.Announce(), data)

    def list(self, model_digest: str | None = None) -> list[bytes]:
        """Signed descriptors, not verified, of the executors of one model, or of all models.

        Raises the errors of `announce`.
        """
        return protocol.decode_listing(self._ask(protocol.Listed, protocol.List(model_digest=model_digest)))

    def close(self) -> None:
        """Close the connection without a message. While another thread uses the connection, call `shut` instead."""
        self._connection.close()

    def shut(self) -> None:
        """Make a running request of another thread fail immediately."""
        self._connection.shut()

    def _ask(
        self, kind: type[protocol.Accepted | protocol.Listed], request: protocol.Request, payload: bytes = b""
    ) -> bytearray:
        _, body = self._connection.expect(
            kind,
            request,
            payload,
            max_payload=protocol.MAX_REPLY,
            deadline=self._deadline,
            decode=protocol.decode_reply,
        )
        return body
