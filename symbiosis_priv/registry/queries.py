"""Asks a registry: one connection, some questions, one deadline over all of it.

The registry shows a certificate that the federation's authority has issued for its host. That keeps others on the path
from reading and withholding; nothing that it says is believed for it.
"""

from __future__ import annotations

import ssl
import time
from types import TracebackType
from typing import Self

from symbiosis_priv.errors import ProtocolError, ProviderError
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.dial import Line
from symbiosis_priv.registry import protocol
from symbiosis_priv.registry.history import Span, VouchedHead, check_span, verify_head
from symbiosis_priv.registry.protocol import MAX_REPLY
from symbiosis_priv.registry.statements import Trust


class RegistryClient:
    """A connection to a registry.

        with RegistryClient("registry.example:7500", context, deadline_s=5) as registry:
            registry.announce(data)

    Args:
        address: `host:port`.
        context: of `tls.registry_client_context`.
        deadline_s: for connecting and for everything that is asked.
    """

    def __init__(self, address: str, context: ssl.SSLContext, *, deadline_s: float) -> None:
        self.address = address
        host, port = parse_address(address)
        self._line = Line(f"registry {address}", host=host, port=port, pins=None, context=context)
        self._deadline_s = deadline_s
        self._deadline = 0.0

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            CertificateError: it is not a registry of this federation.
            TransportError: it cannot be reached in time.
        """
        self._deadline = time.monotonic() + self._deadline_s
        try:
            self._line.open(self._deadline)
        except BaseException:
            self._line.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()

    def announce(self, data: bytes) -> int:
        """Have a signed descriptor taken into the log; its number there.

        Raises:
            ProviderError: it is not taken.
            TransportError, ProtocolError: as they say.
        """
        reply, _ = self._ask(protocol.Announce(), data)
        if not isinstance(reply, protocol.Accepted):
            raise self._confused()
        return reply.entry

    def list(self, model_digest: str) -> list[bytes]:
        """Signed descriptors of those who serve layers of a model: nothing about them has been checked."""
        reply, payload = self._ask(protocol.List(model_digest=model_digest))
        if not isinstance(reply, protocol.Listed):
            raise self._confused()
        return protocol.decode_listing(payload)

    def history(self, *, after: int, trust: Trust) -> tuple[Span, VouchedHead]:
        """A part of the log, and a head of it that has been checked. The entries themselves have not.

        Raises:
            DescriptorError: nobody vouches for who has signed the head, or the entries do not agree with it.
        """
        reply, payload = self._ask(protocol.History(after=after))
        if not isinstance(reply, protocol.Recorded):
            raise self._confused()
        record = protocol.decode_record(payload)
        span, head = Span(record.after, record.before, record.entries), verify_head(record.head, trust, now=time.time())
        check_span(span, head)
        return span, head

    def close(self) -> None:
        """Release the connection, without a word. Not while another thread uses it: see `shut`."""
        self._line.close()

    def shut(self) -> None:
        """From another thread: whatever is under way fails at once."""
        self._line.shut()

    def _ask(self, request: protocol.Request, payload: bytes = b"") -> tuple[protocol.Reply, bytearray]:
        self._line.send(request, payload, deadline=self._deadline)
        header, size = self._line.receive_header(max_payload=MAX_REPLY, deadline=self._deadline)
        reply, body = protocol.decode_reply(header), bytearray(size)
        self._line.fill(body, deadline=self._deadline)
        if isinstance(reply, wire.Failure):
            raise ProviderError(code=reply.code, provider=f"registry {self.address}", detail=reply.detail)
        return reply, body

    def _confused(self) -> ProtocolError:
        return ProtocolError(f"registry {self.address} answered another question than it was asked")
