"""Asks a registry: one connection, some questions, one deadline over all of it.

The registry shows a certificate that the federation's authority has issued for its host. That keeps others on the path
from reading and withholding; nothing that it says is believed for it.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from symbiosis_priv import tls, wire
from symbiosis_priv.errors import ConnectionLostError, DeadlineExceededError, ProtocolError, ProviderError
from symbiosis_priv.federation import parse_address
from symbiosis_priv.registry import protocol
from symbiosis_priv.registry.history import Span, VouchedHead, check_span, verify_head
from symbiosis_priv.registry.protocol import MAX_REPLY
from symbiosis_priv.statements import MAX_BYTES, Trust


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
        self._context = context
        self._deadline_s = deadline_s
        self._deadline = 0.0
        self._socket: socket.socket | None = None
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            CertificateError: it is not a registry of this federation.
            TransportError: it cannot be reached in time.
        """
        self._deadline = time.monotonic() + self._deadline_s
        try:
            host, port = parse_address(self.address)
            raw = self._socket = socket.create_connection((host, port), timeout=self._left())
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = self._context.wrap_socket(raw, server_hostname=host, do_handshake_on_connect=False)
            self._socket = connection
            connection.settimeout(self._left())
            connection.do_handshake()
        except TimeoutError as error:
            self._drop()
            raise self._late() from error
        except (OSError, UnicodeError) as error:  # the latter for hosts that are no names at all
            self._drop()
            failure = error if isinstance(error, OSError) else OSError(str(error))
            raise tls.handshake_error(failure, peer=f"registry {self.address}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()

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
        """From another thread: whatever is under way fails at once."""
        self._closed.set()
        if (connection := self._socket) is not None:
            with contextlib.suppress(OSError):  # wakes its reader; SSLSocket's own would drop the TLS state under it
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connection without a byte on it."""
        self._drop()

    def _ask(self, request: protocol.Request, payload: bytes = b"") -> tuple[protocol.Reply, bytearray]:
        assert len(payload) <= MAX_BYTES
        with self._translated() as connection:
            connection.settimeout(self._left())
            connection.sendall(wire.encode(request, payload_bytes=len(payload)) + payload)
            head, size = wire.decode_prefix(self._exactly(wire.PREFIX.size), max_payload=MAX_REPLY)
            reply = protocol.decode_reply(self._exactly(head))
            body = self._exactly(size)
        if isinstance(reply, wire.Failure):
            raise ProviderError(code=reply.code, provider=f"registry {self.address}", detail=reply.detail)
        return reply, body

    @contextlib.contextmanager
    def _translated(self) -> Iterator[socket.socket]:
        assert self._socket is not None, "enter it first"
        try:
            yield self._socket
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            raise ConnectionLostError(f"the connection to registry {self.address} broke: {error}") from error

    def _exactly(self, size: int) -> bytearray:
        assert self._socket is not None
        data = bytearray(size)
        view = memoryview(data)
        while view:
            self._socket.settimeout(self._left())
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError("closed by the registry")
            view = view[count:]
        return data

    def _left(self) -> float:
        if self._closed.is_set():
            raise ConnectionAbortedError("closed on this side")
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _late(self) -> DeadlineExceededError:
        return DeadlineExceededError(f"registry {self.address} has not answered within {self._deadline_s:g} s")

    def _confused(self) -> ProtocolError:
        return ProtocolError(f"registry {self.address} answered another question than it was asked")

    def _drop(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
