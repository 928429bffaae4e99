"""One TLS connection to one provider in one role: a request goes out, its answer comes back, or the deadline passes.

A request is a fixed run of bytes. If the connection breaks, the *same bytes* are sent again on a new one, until the
deadline: providers keep no state between requests, so this is safe, and it never draws a second mask for
the same row (rule 3). Whatever comes back is checked against the request it should answer (rule 7) before
memory is taken for it. Waiting is always bounded by the request's deadline, and done in slices of two seconds, between
which `tenant.notices` may say what is being waited for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from symbiosis_priv import tls, wire
from symbiosis_priv.buffers import Buffers
from symbiosis_priv.errors import (
    ConnectionLostError,
    DeadlineExceededError,
    ProtocolError,
    ProviderError,
    TransportError,
)
from symbiosis_priv.federation import Peer
from tenant.notices import FIRST_S, Notices

DEADLINE_OPTION = "RemoteConfig(deadline_s=...)"

T = TypeVar("T")
_RECORD = 16 * 1024  # the most that a TLS record carries: the head travels with what fits beside it
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 1.0


class Wiretap(Protocol):
    """Sees every frame exactly as it is on the wire, below encryption: for reviewers, attacks and tests.

    `payload` is the frame's matrix. A tap may change a received payload in place, as a dishonest provider would.
    """

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """A request is about to leave."""

    def received(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """A reply has arrived and nothing has looked at it yet."""


@dataclass
class Traffic:
    """Counters of one channel. Bytes are those of the frames, without TLS overhead."""

    round_trips: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    reconnects: int = 0


class Channel:
    """A connection that comes back by itself.

    Args:
        peer: whom to connect to, and the pinned certificate.
        certificate: the tenant's certificate.
        key: its private key.
        model_digest: what the provider must serve.
        deadline_s: how long one request may take, reconnecting included.
        buffers: where answers lie; memory of their own if None.
        notices: who says what is being waited for; with it, what the option for `deadline_s` is called.
        wiretap: an observer of every frame, or None.
    """

    def __init__(
        self,
        peer: Peer,
        *,
        certificate: Path,
        key: Path,
        model_digest: str,
        deadline_s: float,
        buffers: Buffers | None = None,
        notices: Notices | None = None,
        wiretap: Wiretap | None = None,
    ) -> None:
        self.peer = peer
        self.traffic = Traffic()
        self._hello = wire.Hello(version=wire.VERSION, role=peer.role, model_digest=model_digest)
        self._context = tls.client_context(certificate=certificate, key=key, pins=peer.pins)
        self._deadline_s = deadline_s
        self._buffers = buffers or Buffers(limit=0)
        self._notices = notices or Notices(option=DEADLINE_OPTION)
        self._wiretap = wiretap
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._socket: socket.socket | None = None
        self._slice = 0.0  # the socket's timeout
        self._began = 0.0
        self._welcome: wire.Welcome | None = None

    def welcome(self) -> wire.Welcome:
        """The provider's limits; connects if need be."""
        with self._lock:
            return self._persist(self._connect)

    def request(self, message: wire.Execute | wire.Effect, payload: Tensor | None, *, outputs: int) -> Tensor:
        """Send a request and wait for its answer.

        Args:
            message: the header; `message.nonce` must be fresh.
            payload: CPU matrix `[rows, ...]` for `Execute`, None for `Effect`. Must not change during the call.
            outputs: columns of the answer.

        Returns:
            CPU matrix `[rows, outputs]`, int32 or float32 after the message's arithmetic. Unverified.

        Raises:
            DeadlineExceededError: no answer in time.
            ProviderError: the provider refused.
            ProtocolError: the answer is malformed or answers another request.
        """
        with self._lock:
            return self._persist(lambda deadline: self._round_trip(message, payload, outputs, deadline))

    def close(self) -> None:
        """Close for good, without waiting: a request in flight in another thread fails."""
        self._closed.set()
        if (connection := self._socket) is not None:
            with contextlib.suppress(OSError):  # wakes its reader; SSLSocket's own would drop the TLS state under it
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
        if self._lock.acquire(blocking=False):  # else the request in flight drops the connection as it fails
            self._drop()
            self._lock.release()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connection without a byte on it. This channel is not used again."""
        self._closed.set()
        self._drop()

    def _persist(self, attempt: Callable[[float], T]) -> T:
        self._began = time.monotonic()
        deadline = self._began + self._deadline_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                result = attempt(deadline)
                self._notices.answered(self._name)
                return result
            except TransportError as error:
                self._drop()
                if self._closed.is_set():
                    raise ConnectionLostError(f"the connection to {self._name} was closed on this side") from error
                if time.monotonic() + pause >= deadline:
                    raise DeadlineExceededError(
                        f"no answer from {self._name} within {self._deadline_s:g} s (last: {error}). Is it running? "
                        f"{self._notices.option} waits longer."
                    ) from error
                self.traffic.reconnects += 1
                self._say(deadline, str(error))
                self._closed.wait(pause)
                pause = min(2 * pause, _LAST_PAUSE_S)
            except BaseException:
                self._drop()  # the stream may be in the middle of a frame
                raise

    def _round_trip(
        self, message: wire.Execute | wire.Effect, payload: Tensor | None, outputs: int, deadline: float
    ) -> Tensor:
        self._connect(deadline)
        if self._wiretap:
            self._wiretap.sent(self.peer, message, payload)
        self._send(message, payload, deadline)
        reply, answer = self._receive(
            deadline,
            expect=(message.rows, outputs, message.arithmetic),
            max_payload=message.rows * outputs * wire.ITEM_BYTES,
        )
        if self._wiretap:
            self._wiretap.received(self.peer, reply, answer)
        self.traffic.round_trips += 1
        if isinstance(reply, wire.Failure):
            raise self._failure(reply)
        if not isinstance(reply, wire.Result) or answer is None or not reply.answers(message):
            raise ProtocolError(f"{self._name} answered another request than the one it was asked")
        return answer

    def _connect(self, deadline: float) -> wire.Welcome:
        if self._welcome is None:
            if self._closed.is_set():
                raise ConnectionLostError(f"{self._name} is asked no more")
            try:
                raw = self._dial(deadline)
            except OSError as error:
                raise ConnectionLostError(f"cannot reach {self._name}: {error}") from error
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                connection = self._context.wrap_socket(
                    raw, server_hostname=self.peer.host, do_handshake_on_connect=False
                )
                self._socket = connection
                self._within(deadline, connection.do_handshake, "it has not finished the TLS handshake")
                tls.check_pin(connection, pins=self.peer.pins)
            except OSError as error:
                raise tls.handshake_error(error, peer=self._name) from error
            self._send(self._hello, None, deadline)
            reply, _ = self._receive(deadline, expect=None, max_payload=0)
            if isinstance(reply, wire.Failure):
                raise self._failure(reply)
            if not isinstance(reply, wire.Welcome) or reply.model_digest != self._hello.model_digest:
                raise ProtocolError(f"{self._name} does not serve the pinned model")
            self._welcome = reply
        return self._welcome

    def _dial(self, deadline: float) -> socket.socket:
        """Like `socket.create_connection`, but `close` can reach a socket that is still connecting."""
        refusal: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(
            self.peer.host, self.peer.port, type=socket.SOCK_STREAM
        ):
            candidate = self._socket = socket.socket(family, kind, protocol)
            try:
                candidate.setblocking(False)
                self._slice = 0.0
                if (code := candidate.connect_ex(address)) == errno.EINPROGRESS:
                    code = self._within(deadline, partial(_connected, candidate), "it does not take the connection")
                if code:
                    raise OSError(code, os.strerror(code))
                return candidate
            except OSError as error:
                refusal = error
                candidate.close()
        assert refusal is not None  # getaddrinfo raises if it finds no address
        raise refusal

    def _send(self, message: wire.Message, payload: Tensor | None, deadline: float) -> None:
        body = memoryview(b"") if payload is None else wire.as_bytes(payload)
        head = wire.encode(message, payload_bytes=len(body))
        beside = _RECORD - len(head)
        self._write(head + body[:beside], deadline)
        self._write(body[beside:], deadline)
        self.traffic.bytes_sent += len(head) + len(body)

    def _receive(
        self, deadline: float, *, expect: tuple[int, int, wire.Arithmetic] | None, max_payload: int
    ) -> tuple[wire.Reply, Tensor | None]:
        prefix = bytearray(wire.PREFIX.size)
        self._read(prefix, deadline)
        header_size, payload_size = wire.decode_prefix(prefix, max_payload=max_payload)
        header = bytearray(header_size)
        self._read(header, deadline)
        reply = wire.decode_reply(header)
        self.traffic.bytes_received += len(prefix) + header_size + payload_size
        if expect is None or not isinstance(reply, wire.Result):
            if payload_size:
                raise ProtocolError(f"{self._name} sent a payload where none belongs")
            return reply, None
        rows, outputs, arithmetic = expect
        if payload_size != max_payload:
            raise ProtocolError(f"{self._name} sent {payload_size} bytes where {rows} rows of {outputs} belong")
        answer = self._buffers.matrix(rows, outputs, dtype=wire.payload_dtype(arithmetic))
        self._read(wire.as_bytes(answer), deadline)
        return reply, answer

    def _write(self, data: bytes | memoryview, deadline: float) -> None:
        assert self._socket is not None
        view = memoryview(data)
        while view:
            try:
                count = self._within(deadline, partial(self._socket.send, view), "it does not take the request")
            except OSError as error:
                raise self._lost(error) from error
            view = view[count:]

    def _read(self, buffer: bytearray | memoryview, deadline: float) -> None:
        assert self._socket is not None
        view = memoryview(buffer)
        while view:
            try:
                count = self._within(deadline, partial(self._socket.recv_into, view), "it has not answered yet")
            except OSError as error:
                raise self._lost(error) from error
            if not count:
                raise ConnectionLostError(f"{self._name} closed the connection")
            view = view[count:]

    def _within(self, deadline: float, operation: Callable[[], T], why: str) -> T:
        """What a socket operation gives, tried again from slice to slice up to the deadline."""
        assert self._socket is not None
        while (left := deadline - time.monotonic()) > 0 and not self._closed.is_set():
            if self._slice != (length := min(left, FIRST_S)):  # a system call, and there are thousands of records
                self._slice = length
                self._socket.settimeout(length)
            try:
                return operation()
            except TimeoutError:
                self._say(deadline, why)
        raise TimeoutError(why)

    def _say(self, deadline: float, why: str) -> None:
        self._notices.waiting(self._name, since=self._began, until=deadline, why=why)

    def _lost(self, error: OSError) -> Exception:
        if self._welcome is None:  # a refused certificate shows up at the first read, see tls
            return tls.handshake_error(error, peer=self._name)
        return ConnectionLostError(f"connection to {self._name} broke: {error}")

    def _failure(self, reply: wire.Failure) -> Exception:
        if reply.code in wire.RETRYABLE:
            return ConnectionLostError(f"{self._name} is {reply.code}")
        return ProviderError(code=reply.code, provider=self.peer.name, detail=reply.detail)

    @property
    def _name(self) -> str:
        return f"{self.peer.role} {self.peer.name!r} at {self.peer.host}:{self.peer.port}"

    def _drop(self) -> None:
        self._welcome = None
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


def fresh_nonce() -> bytes:
    """16 random bytes that bind an answer to its request."""
    return secrets.token_bytes(wire.NONCE_BYTES)


def _connected(candidate: socket.socket) -> int:
    """Wait until a connection is made or refused, as long as the socket's timeout allows; the error's number, or 0."""
    poll = select.poll()
    poll.register(candidate, select.POLLOUT)
    if not poll.poll(1e3 * (candidate.gettimeout() or 0.0)):
        raise TimeoutError
    return candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
