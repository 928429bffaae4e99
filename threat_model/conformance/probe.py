"""A bare connection to a live provider: sends what it is told, right or wrong, and judges nothing.

`tenant.channel.Channel` reconnects, resends and refuses whatever is not bound to its request: what a tenant wants, and
what would hide the faults that `properties` looks for. Every wait ends at a deadline.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch import Tensor

from provider.link import Link
from symbiosis_priv import tls, wire
from symbiosis_priv.errors import ConnectionLostError, DeadlineExceededError
from symbiosis_priv.federation import Peer

_PAUSE_S = 0.05


@dataclass(frozen=True)
class Dialler:
    """How to reach one provider as one tenant.

    Args:
        peer: address, role and pinned certificate.
        certificate: the tenant's certificate: providers serve nobody they cannot name.
        key: its private key.
        deadline_s: for one exchange, and for one connection attempt.
    """

    peer: Peer
    certificate: Path
    key: Path
    deadline_s: float

    def __str__(self) -> str:
        return f"{self.peer.role} {self.peer.name!r} at {self.peer.host}:{self.peer.port}"

    def connect(self) -> Probe:
        """An authenticated connection, nothing said yet.

        Raises:
            CertificateError: either side's certificate is not the right one.
            TransportError: nobody answers there.
        """
        context = tls.client_context(certificate=self.certificate, key=self.key, pins=self.peer.pins)
        try:
            raw = socket.create_connection((self.peer.host, self.peer.port), timeout=self.deadline_s)
        except OSError as error:
            raise ConnectionLostError(f"cannot reach {self}: {error}; is it running?") from error
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = context.wrap_socket(raw, server_hostname=self.peer.host)
            tls.check_pin(connection, pins=self.peer.pins)
        except OSError as error:
            raw.close()
            raise tls.handshake_error(error, peer=str(self)) from error
        except BaseException:
            raw.close()
            raise
        return Probe(connection, dialler=self)


class Probe:
    """One connection. A context manager."""

    def __init__(self, connection: ssl.SSLSocket, *, dialler: Dialler) -> None:
        self._link = Link(connection)
        self._dialler = dialler
        self._heard = False  # a refused certificate shows at the first read (see tls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._link.close()

    def send(self, message: wire.Message, payload: Tensor | None = None) -> None:
        """Send one frame.

        Raises:
            TransportError: the connection is gone, or the provider does not read.
        """
        body = memoryview(b"") if payload is None else wire.as_bytes(payload)
        with self._translated():
            self._link.send(wire.encode(message, payload_bytes=len(body)), body, deadline=self._deadline())

    def receive(self, *, max_payload: int) -> tuple[wire.Reply, bytearray]:
        """Wait for one frame: its header and the bytes behind it.

        Raises:
            ProtocolError: not a frame, or it announces more than `max_payload` bytes. The connection is of no more use.
            TransportError: the connection is gone, or nothing came in time.
        """
        deadline = self._deadline()
        with self._translated():
            prefix = self._read(wire.PREFIX.size, deadline)
            self._heard = True
            header_size, payload_size = wire.decode_prefix(prefix, max_payload=max_payload)
            reply = wire.decode_reply(self._read(header_size, deadline))
            return reply, self._read(payload_size, deadline)

    def ask(
        self, message: wire.Message, payload: Tensor | None = None, *, max_payload: int = 0
    ) -> tuple[wire.Reply, bytearray]:
        """Send one frame and wait for the reply. A busy provider is asked again with the same bytes until the deadline.

        Raises:
            ProtocolError, TransportError: as `receive` and `send` say.
        """
        deadline = self._deadline()
        while True:
            self.send(message, payload)
            reply, body = self.receive(max_payload=max_payload)
            if not (isinstance(reply, wire.Failure) and reply.code in wire.RETRYABLE):
                return reply, body
            if time.monotonic() + _PAUSE_S > deadline:
                raise DeadlineExceededError(f"{self._dialler} was {reply.code} for {self._dialler.deadline_s:g} s")
            time.sleep(_PAUSE_S)

    def _deadline(self) -> float:
        return time.monotonic() + self._dialler.deadline_s

    def _read(self, size: int, deadline: float) -> bytearray:
        data = bytearray(size)
        self._link.receive(memoryview(data), deadline=deadline)
        return data

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turns the socket's errors into this project's."""
        try:
            yield
        except TimeoutError as error:  # DeadlineExceededError included
            raise DeadlineExceededError(
                f"{self._dialler} gave no answer within {self._dialler.deadline_s:g} s; --deadline waits longer"
            ) from error
        except OSError as error:
            if not self._heard:
                raise tls.handshake_error(error, peer=str(self._dialler)) from error
            raise ConnectionLostError(f"the connection to {self._dialler} broke: {error}") from error
