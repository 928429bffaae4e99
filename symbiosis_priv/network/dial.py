"""The wire client: opens a connection to a provider, an executor's link or a registry, and exchanges frames.

Sessions, probes, health, `verify`, registries' clients, links between providers and benchmarks all use it. `ask` makes
one exchange, and repeats it while the provider is busy if it is told to; `expect` refuses other replies than the one
that answers the request. Sessions use `send`, `receive` and `fill`, which give the payload its memory. After `agree`,
seeds are sealed when they are sent, and `uncover` opens effects; a seed is never sent without.

A `ClientConnection` is a TLS 1.3 connection with the provider's certificate pinned. Every wait ends at a deadline; a
trickle of bytes does not extend the deadline. A wait runs in slices of two seconds, and the caller is told after each
slice. Another thread may call `shut` at any moment, also while the connection is being opened: the wait then ends.

The size of a frame is checked against a limit before the frame is read.
"""

import contextlib
import errno
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, astuple, dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

import msgspec
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import SEED_BYTES
from symbiosis_priv.certificates.reading import Pin
from symbiosis_priv.errors import (
    ConnectionLostError,
    DeadlineExceededError,
    ProtocolError,
    ProviderError,
    SymbiosisError,
)
from symbiosis_priv.network import hybrid, tls, wire
from symbiosis_priv.network.addresses import Found, is_internal, is_own
from symbiosis_priv.network.stream import NOTHING, SLICE_S, FrameStream, Waiting, shut

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)
_BUSY_S = 0.05  # seconds before a request to a busy provider is repeated
_KEEP_ALIVE_S = 30  # a NAT or firewall forgets connections that are idle for some minutes, and tells nobody


@dataclass
class Traffic:
    """Counters. Bytes are those of frames, without TLS overhead."""

    round_trips: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(eq=False, repr=False)
class ClientConnection:
    """One connection to one provider, for one thread at a time; another thread may call `shut` only. With
    `remote_only`, it reaches no address of this machine, its link or a metadata service, whatever the host resolves
    to."""

    name: str  # the provider's role, name and address, for messages
    _: KW_ONLY
    host: str
    port: int
    pins: Sequence[Pin] | None  # the provider's certificates; None: every certificate that the context trusts
    context: ssl.SSLContext  # `tls.client_context` for the same pins
    provider: str = ""  # its name in a `ProviderError`
    remote_only: bool = False
    choose: Callable[[Sequence[Found]], Sequence[Found]] = lambda found: found  # those to which it may connect
    traffic: Traffic = field(default_factory=Traffic)
    waiting: Waiting | None = None  # called after every slice of a wait
    stream: FrameStream | None = field(default=None, init=False)  # of the open connection
    _sealing: hybrid.Sealing | None = field(default=None, init=False)  # of a connection with a helper
    _socket: socket.socket | None = field(default=None, init=False)
    _shut: bool = field(default=False, init=False)
    _received: bool = field(default=False, init=False)  # a refused certificate is reported at the first read, see `tls`

    @property
    def tls(self) -> ssl.SSLObject | None:
        """The TLS state after the handshake; None before it."""
        return None if self.stream is None else self.stream.tls

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, deadline: float) -> None:
        """Connect, complete the TLS handshake, and compare the certificate with the pins. Sends no frame, and leaves
        nothing open after an error. Raises `CertificateError`: either side's certificate is not the right one;
        `TransportError`: the address does not answer in time."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            try:
                raw = self._dial(deadline)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if (idle := getattr(socket, "TCP_KEEPIDLE", None)) is not None:  # not on every system
                    raw.setsockopt(socket.IPPROTO_TCP, idle, _KEEP_ALIVE_S)
            # a host like a..b is not a valid name; or no thread can be started
            except (OSError, UnicodeError, RuntimeError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ConnectionLostError(f"cannot reach {self.name}: {reason}") from error
            try:
                stream = self.stream = FrameStream(raw, self.context, host=self.host)
                stream.waiting = self._waited
                stream.handshake(deadline)
                if self.pins is not None:
                    tls.check_pin(stream.tls, pins=self.pins)
            except TimeoutError as error:
                raise DeadlineExceededError(f"connection to {self.name} broke: {error}") from error
            except OSError as error:
                raise tls.handshake_error(error, peer=self.name, pins=self.pins) from error
            undo.pop_all()

    def agree(self, *, deadline: float) -> None:
        """Agree with a helper, which has welcomed this tenant, on the key of seeds and effects. Raises as `expect`
        does, and `ConfigError` where ML-KEM-768 is missing."""
        offer = hybrid.KeyOffer()
        answer, _ = self.expect(wire.KeyAnswer, offer.message, deadline=deadline)
        assert self.tls is not None
        self._sealing = offer.sealing(answer, self.tls)

    def uncover(self, reply: wire.Reply, payload: bytearray | memoryview) -> None:
        """Open the payload of an answer in place, if it is an effect."""
        if self._sealing is not None and isinstance(reply, wire.Result):
            self._sealing.uncover(reply.nonce, payload)

    def send(
        self,
        message: wire.Message,
        payload: Tensor | bytes | memoryview | None = None,
        *,
        announced: int | None = None,
        deadline: float,
    ) -> None:
        """Send one frame; who tests a provider may announce another payload than it sends. Raises `TransportError`: the
        connection is gone, or the provider does not read."""
        if isinstance(payload, Tensor):
            assert isinstance(message, wire.Binding)  # only these messages have a matrix
            body = message.encoding.pack(payload)
        else:
            body = memoryview(payload or b"")
        if isinstance(message, wire.Effect) and len(message.seed) == SEED_BYTES:
            if self._sealing is None:
                raise ProtocolError(f"{self.name} has agreed on no key for seeds")
            message = self._sealing.seal(message)
        head = wire.encode(message, payload_bytes=len(body) if announced is None else announced)
        self.send_bytes(head, body, deadline=deadline)

    def send_bytes(self, head: bytes, body: memoryview = NOTHING, *, deadline: float) -> None:
        """Send bytes, which need not be a frame. Raises as `send`."""
        assert self.stream is not None
        self._guarded(partial(self.stream.send_frame, head, body, deadline=deadline))
        self.traffic.bytes_sent += len(head) + len(body)

    def receive(self, *, max_payload: int, deadline: float) -> tuple[wire.Reply, int]:
        """Wait for a frame's header. Returns it, and the number of payload bytes that follow, for `fill`. Raises
        `ProtocolError`: not a frame, or its payload exceeds the limit, and the connection cannot be used again;
        `TransportError`: the connection is gone, or nothing came in time."""
        header, payload_size = self.receive_header(max_payload=max_payload, deadline=deadline)
        return wire.decode_reply(header), payload_size

    def receive_header(self, *, max_payload: int, deadline: float) -> tuple[memoryview, int]:
        """Receive the header of a message that `wire` does not define. Parse it before anything else is read. Returns
        the header's bytes, and the number of payload bytes that follow."""
        assert self.stream is not None
        head = partial(self.stream.receive_head, max_payload=max_payload, deadline=deadline)
        header, payload_size = self._guarded(head)
        self._received = True
        self.traffic.bytes_received += wire.PREFIX.size + len(header) + payload_size
        return header, payload_size

    def read(
        self, *, max_payload: int, deadline: float, decode: Callable[[wire.Buffer], Any] = wire.decode_reply
    ) -> tuple[Any, bytearray]:
        """Wait for a frame and its payload. Raises as `receive`."""
        header, size = self.receive_header(max_payload=max_payload, deadline=deadline)
        reply, body = decode(header), bytearray(size)
        self.fill(body, deadline=deadline)
        self.uncover(reply, body)
        return reply, body

    def ask(
        self,
        message: wire.Message,
        payload: Tensor | bytes | memoryview | None = None,
        *,
        max_payload: int = 0,
        deadline: float,
        patient: bool = False,
        decode: Callable[[wire.Buffer], Any] = wire.decode_reply,
    ) -> tuple[Any, bytearray]:
        """Send a request, and wait for its reply and the reply's payload, which are not checked further. With
        `patient`, send the same bytes again until the deadline while the provider is busy. `decode` parses another
        protocol's replies. Raises `ProtocolError` and `TransportError` as `receive` does."""
        while True:
            self.send(message, payload, deadline=deadline)
            reply, body = self.read(max_payload=max_payload, deadline=deadline, decode=decode)
            if not patient or not isinstance(reply, wire.Failure) or reply.code not in wire.RETRYABLE:
                return reply, body
            if time.monotonic() + _BUSY_S > deadline:
                raise DeadlineExceededError(f"{self.name} was {reply.code} until the deadline")
            time.sleep(_BUSY_S)

    def expect(
        self, kind: type[R], message: wire.Message, payload: Tensor | bytes | memoryview | None = None, **how: Any
    ) -> tuple[R, bytearray]:
        """Ask as `ask` does, and refuse every reply that is not of this kind. Raises `ProviderError`: the provider
        refused; `ProtocolError` also for a reply of another kind."""
        reply, body = self.ask(message, payload, **how)
        if isinstance(reply, wire.Failure):
            raise ProviderError(code=reply.code, provider=self.provider or self.name, detail=reply.detail)
        if not isinstance(reply, kind):
            raise ProtocolError(
                f"{self.name} answered a {type(message).__name__} with another message than {kind.__name__}: do both "
                f"sides run the same release?"
            )
        return reply, body

    def fill(self, buffer: bytearray | memoryview, *, deadline: float) -> None:
        """Read bytes until the buffer is full. Raises `TransportError`: the connection is gone, or they came late."""
        assert self.stream is not None
        self._guarded(partial(self.stream.receive, memoryview(buffer), deadline=deadline))

    def peer_left(self) -> bool:
        """Returns True if the provider or the network has closed the connection. Does not wait."""
        return self.stream is None or self.stream.peer_left()

    def shut(self) -> None:
        """End every wait on this connection with an error. The connection cannot be used again. Thread-safe."""
        self._shut = True
        if (connection := self._socket) is not None:
            shut(connection)

    def close(self) -> None:
        """Release the socket without a TLS alert. While another thread uses the connection, call `shut` instead."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = self.stream = self._sealing = None

    def _dial(self, deadline: float) -> socket.socket:
        """Like `socket.create_connection`, but `shut` can reach a socket that is still connecting."""
        refusal = OSError("it has no address that may be dialled")
        for family, kind, protocol, _, address in self.choose(self._addresses(deadline)):
            if self.remote_only and (is_internal(address[0]) or is_own(family, address)):
                refusal = OSError(f"{address[0]} is not an address that a registry may lead to")
                continue
            candidate = self._socket = socket.socket(family, kind, protocol)
            try:
                candidate.setblocking(False)
                if (code := candidate.connect_ex(address)) == errno.EINPROGRESS:
                    poll = select.poll()
                    poll.register(candidate, select.POLLOUT)

                    def connected(timeout: float, poll: select.poll = poll) -> None:
                        if not poll.poll(1e3 * timeout):
                            raise TimeoutError

                    self._within(deadline, connected, "it does not take the connection")
                    code = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                return candidate
            except OSError as error:
                refusal = error
                candidate.close()
        raise refusal

    def _addresses(self, deadline: float) -> Sequence[Found]:
        """Resolve the host name in another thread: `getaddrinfo` has no deadline, and anybody may run its DNS
        servers."""
        found: Future[Sequence[Found]] = Future()

        def look_up() -> None:
            try:
                found.set_result(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM))
            except Exception as error:  # an exception of the resolver is for the caller
                found.set_exception(error)

        threading.Thread(target=look_up, name="look-up", daemon=True).start()
        return self._within(deadline, found.result, "its name is being looked up")

    def _guarded(self, operation: Callable[[], T]) -> T:
        """Run an operation of the stream. An error names the provider."""
        try:
            return operation()
        except (OSError, ConnectionLostError) as error:
            raise self.named(error) from error

    def named(self, error: OSError | ConnectionLostError) -> SymbiosisError:
        """The error to raise for an error of `stream`: it names the provider."""
        if isinstance(error, ConnectionLostError):
            return ConnectionLostError(f"{self.name} closed the connection")
        if isinstance(error, TimeoutError):
            return DeadlineExceededError(f"connection to {self.name} broke: {error}")
        if not self._received:
            return tls.handshake_error(error, peer=self.name, pins=self.pins)
        return ConnectionLostError(f"connection to {self.name} broke: {error}")

    def _within(self, deadline: float, operation: Callable[[float], T], why: str) -> T:
        """Repeat an operation, called with a timeout in seconds, until it succeeds."""
        while (left := deadline - time.monotonic()) > 0:
            try:
                return operation(min(left, SLICE_S))
            except TimeoutError:
                self._waited(deadline, why)
        raise TimeoutError(why)

    def _waited(self, deadline: float, why: str) -> None:
        if self._shut:
            raise TimeoutError(why)
        if self.waiting is not None:
            self.waiting(deadline, why)
