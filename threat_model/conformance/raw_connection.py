"""A connection to a provider that sends valid and invalid messages and checks no answer.

`tenant.connections.channel.Channel` reconnects, resends and refuses replies that are not bound to their request. A
tenant needs that, but it would hide the faults that `properties` looks for. Every wait has a deadline.
"""

from __future__ import annotations

import functools
import math
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch import Tensor

from symbiosis_priv.errors import DeadlineExceededError, TransportError
from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire
from symbiosis_priv.network.dial import ClientConnection
from symbiosis_priv.network.tls import client_context


class OutOfTime(Exception):
    """The tests of one provider have exceeded their time limit."""


@dataclass
class Dialler:
    """Opens connections to one provider as one tenant.

    Args:
        certificate: the tenant's certificate, which providers ask for.
        deadline_s: seconds for one exchange, and for one connection attempt.
        until: the moment of `time.monotonic()` at which every exchange ends in OutOfTime.
    """

    peer: Peer
    certificate: Path
    key: Path
    deadline_s: float
    until: float = math.inf

    def __str__(self) -> str:
        return self.peer.label

    def connect(self) -> RawConnection:
        """An authenticated connection without a hello.

        Raises:
            CertificateError: the provider refuses the tenant's certificate, or shows one that is not pinned.
            TransportError: no provider answers at the address.
            OutOfTime: `until` has passed.
        """
        connection = self.peer.connection(self._context)
        try:
            connection.open(self.deadline())
        except TransportError as error:
            self.check_time()
            raise type(error)(f"{error}; is it running?") from error
        return RawConnection(connection, dialler=self)

    @functools.cached_property
    def _context(self) -> ssl.SSLContext:
        return client_context(certificate=self.certificate, key=self.key, pins=self.peer.pins)

    def deadline(self) -> float:
        """The deadline of an exchange that starts now. Raises OutOfTime if `until` has passed."""
        self.check_time()
        return min(time.monotonic() + self.deadline_s, self.until)

    def check_time(self) -> None:
        """Raises OutOfTime if `until` has passed."""
        if time.monotonic() >= self.until:
            raise OutOfTime


class RawConnection:
    """One connection. A context manager."""

    def __init__(self, connection: ClientConnection, *, dialler: Dialler) -> None:
        self._connection, self._dialler = connection, dialler

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def send(self, message: wire.Message, payload: Tensor | None = None) -> None:
        """Send one frame.

        Raises:
            TransportError: the connection was closed, or the provider does not read.
        """
        with self._explaining_deadlines():
            self._connection.send(message, payload, deadline=self._dialler.deadline())

    def receive(self, *, max_payload: int) -> tuple[wire.Reply, bytearray]:
        """Wait for one frame. Returns its header and its payload.

        Raises:
            ProtocolError: not a frame, or its payload exceeds `max_payload` bytes. The connection cannot be used again.
            TransportError: the connection was closed, or no frame arrived in time.
        """
        deadline = self._dialler.deadline()
        with self._explaining_deadlines():
            reply, size = self._connection.receive(max_payload=max_payload, deadline=deadline)
            body = bytearray(size)
            self._connection.fill(body, deadline=deadline)
            return reply, body

    def ask(
        self, message: wire.Message, payload: Tensor | None = None, *, max_payload: int = 0
    ) -> tuple[wire.Reply, bytearray]:
        """Send one frame and wait for the reply. If the provider is busy, send the same bytes again until the deadline.

        Raises:
            ProtocolError, TransportError: see `receive` and `send`.
        """
        deadline = self._dialler.deadline()
        with self._explaining_deadlines():
            return self._connection.ask(message, payload, max_payload=max_payload, deadline=deadline, patient=True)

    @contextmanager
    def _explaining_deadlines(self) -> Iterator[None]:
        """Add the option for longer waits to a deadline's message."""
        try:
            yield
        except DeadlineExceededError as error:
            self._dialler.check_time()
            raise DeadlineExceededError(
                f"{self._dialler} gave no answer within {self._dialler.deadline_s:g} s; --deadline waits longer"
            ) from error
