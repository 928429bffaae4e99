"""One TLS connection to one provider in one role. It carries one request at a time and waits at most until a deadline.

The bytes of a request are fixed. `attempt` sends a request once. `request` retries: if the connection breaks or the
provider is busy, it sends the *same bytes* again, on a new connection, until the deadline. This is safe because
providers need no state between requests, and it draws no second mask for a row (rule 3). The request alone determines
how much memory its answer takes, and the memory is allocated while the answer is awaited. An answer is checked against
its request (rule 7) before it is used. `notices` logs what a request waits for.
"""

import math
import os
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.passes import Buffers
from symbiosis_priv.errors import (
    ConnectionLostError,
    DeadlineExceededError,
    ProtocolError,
    ProviderError,
    TransportError,
)
from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire
from symbiosis_priv.network.dial import ClientConnection, Traffic
from symbiosis_priv.system.pacing import Backoff
from tenant.connections.notices import Notices
from tenant.core.masked import MaskedRows
from tenant.worker import Worker

T = TypeVar("T")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 1.0


class Wiretap(Protocol):
    """Observes every frame before encryption and after decryption, for reviewers, attacks and tests. `payload` is the
    frame's matrix. A wiretap may change a received payload in place, as a dishonest provider would."""

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """Called before a request is sent."""

    def received(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """Called when a reply has arrived, before it is checked."""


class KnownFrames:
    """The frames of a request like `like` and of its usual answer, before and after the nonce, without payloads."""

    def __init__(self, like: wire.Execute, *, inputs: int, outputs: int) -> None:
        self.like, self.outputs, self.encoding = like, outputs, like.encoding
        self.request = self._halves(like, inputs)
        self.answer = self._halves(wire.Result.answering(like), outputs)

    def message(self, nonce: bytes) -> wire.Execute:
        """The request with this nonce."""
        return msgspec.structs.replace(self.like, nonce=nonce)

    def _halves(self, message: wire.Binding, width: int) -> tuple[bytes, bytes]:
        frame = wire.encode(message, payload_bytes=self.encoding.size(message.rows, width))
        before, _, after = frame.partition(message.nonce)
        return before, after


class RepeatedRequest(NamedTuple):
    """A request like an earlier one, and memory for its answer, int32 `[rows, outputs]`."""

    frames: KnownFrames
    nonce: bytes
    rows: MaskedRows
    answer: Tensor


class Channel:
    """A connection that reconnects by itself. It serves one thread at a time; other threads wait. `context`:
    `tls.client_context` for the peer's pins. `buffers`: memory for answers; each has its own if None. `ring_bits`: of
    the integers in requests. `permit`: called with the provider and the rows before a request is sent; raises if it
    must not be sent. `used_at`: time of the latest answer to `repeat`. `closed`: set when this side has closed the
    channel; a failure is then not counted against the provider."""

    def __init__(
        self,
        peer: Peer,
        *,
        context: ssl.SSLContext,
        model_digest: str,
        deadline_s: float,
        buffers: Buffers | None = None,
        notices: Notices | None = None,
        wiretap: Wiretap | None = None,
        ring_bits: wire.RingBits = 32,
        permit: Callable[[Peer, MaskedRows | None], None] | None = None,
    ) -> None:
        self.peer = peer
        self.traffic = Traffic()
        self.worker = Worker(f"{peer.role}-{peer.name}")
        version = wire.version_of(ring_bits, role=peer.role)
        self._hello = wire.Hello(version=version, role=peer.role, model_digest=model_digest)
        self._context = context
        self._deadline_s = deadline_s
        self._buffers = buffers or Buffers(limit=0)
        self._notices = notices or Notices()
        self._wiretap = wiretap
        self._permit = permit
        self._lock = threading.Lock()
        self.closed = threading.Event()
        self._name = peer.label
        self.connection: ClientConnection | None = None
        self._began = self.used_at = 0.0
        self._wanted: Callable[[], bool] | None = None
        self._welcome: wire.Welcome | None = None

    def welcome(self, *, wanted: Callable[[], bool] | None = None, refused_s: float = math.inf) -> wire.Welcome:
        """Connect unless there is a connection, with retries. Returns the layers and limits of the provider. `wanted`:
        returns False when no caller waits for the provider any more; then nothing is logged or tried again.
        `refused_s`: seconds after which a connection that is still refused is not tried again. Raises
        `ConnectionLostError`: the address refuses connections; `DeadlineExceededError`; `ProviderError`,
        `ProtocolError`: the provider refused, or does not serve the pinned model."""
        return self._retry(partial(self.connect, wanted=wanted), wanted=wanted, refused_s=refused_s)

    def connect(
        self, *, deadline: float, since: float | None = None, wanted: Callable[[], bool] | None = None
    ) -> wire.Welcome:
        """`welcome` without retrying."""
        return self._once(self._connect, deadline, since=since, wanted=wanted)

    def probe(self) -> wire.Welcome | None:
        """Return the provider's layers and limits without waiting; None without an open connection."""
        connection = self.connection  # another thread may close it
        stream = None if connection is None else connection.stream
        return None if stream is None or stream.peer_left() else self._welcome

    def request(self, message: wire.Execute | wire.Effect, payload: MaskedRows | None, *, outputs: int) -> Tensor:
        """Send a request, with retries, and wait for its answer. `payload`: the rows for `Execute`, None for `Effect`.
        `outputs`: columns of the answer. Returns an unverified CPU matrix `[rows, outputs]`, int32 or float32 depending
        on the message's arithmetic. Raises `DeadlineExceededError`: no answer in time; `ProviderError`: the provider
        refused; `ProtocolError`: the answer is malformed or answers another request; `TypeError`: the payload is not
        `MaskedRows`, and nothing was sent."""
        return self._retry(partial(self.attempt, message, payload, outputs=outputs))

    def attempt(
        self,
        message: wire.Execute | wire.Effect,
        payload: MaskedRows | None,
        *,
        outputs: int,
        deadline: float,
        since: float | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """`request` without retrying. `deadline`: time on the clock of `time.monotonic`. `meanwhile`: called while the
        answer is awaited. Raises `TransportError`: the provider is away, busy or too slow; the same bytes may be sent
        to any provider."""
        ask = partial(self._round_trip, message, payload, outputs, meanwhile=meanwhile)
        return self._once(ask, deadline, since=since)

    def repeat(self, request: RepeatedRequest, *, deadline: float, meanwhile: Callable[[], None]) -> Tensor:
        """`attempt` with a request like an earlier one on this channel."""
        return self._once(partial(self._repeat, request, meanwhile), deadline)

    def close(self) -> None:
        """Close for good, without waiting. A request in flight in another thread fails. The caller joins `worker`."""
        self.closed.set()
        self.worker.stop()
        if (connection := self.connection) is not None:
            connection.shut()
        self.drop_if_idle()  # otherwise the request in flight drops the connection when it ends

    def drop_if_idle(self) -> None:
        """Close the connection unless a request uses it. The next request makes a new connection."""
        if self._lock.acquire(blocking=False):
            self._drop()
            self._lock.release()

    def abandon(self) -> None:
        """Close the parent's connection in a forked child, without sending a byte. The channel is not used again."""
        self.closed.set()
        self._drop()

    def _once(
        self,
        operation: Callable[[float], T],
        deadline: float,
        *,
        since: float | None = None,
        wanted: Callable[[], bool] | None = None,
    ) -> T:
        with self._lock:
            self._began = time.monotonic() if since is None else since
            self._wanted = wanted
            try:
                result = operation(deadline)
            except BaseException as error:
                self._drop()  # the stream may be in the middle of a frame
                if self.closed.is_set() and isinstance(error, TransportError):
                    raise ConnectionLostError(f"the connection to {self._name} was closed on this side") from error
                raise
        if self._notices.waits:
            self._notices.answered(self._name)
        if self.closed.is_set():  # `close` ran during the request, and could not take the lock
            self.drop_if_idle()
        return result

    def _retry(
        self,
        operation: Callable[..., T],
        *,
        wanted: Callable[[], bool] | None = None,
        refused_s: float = math.inf,
    ) -> T:
        """Repeat an operation, which is called with its `deadline`, and with `since`, the time of the first attempt."""
        began = time.monotonic()
        deadline, backoff = began + self._deadline_s, Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)
        while True:
            try:
                return operation(deadline=deadline, since=began)
            except TransportError as error:
                if self.closed.is_set() or (wanted and not wanted()):
                    raise
                pause_s = backoff.failed()
                next_at = time.monotonic() + pause_s
                if isinstance(error.__cause__, ConnectionRefusedError) and next_at >= began + refused_s:
                    raise ConnectionLostError(
                        f"nothing listens at the address of {self._name}: start the provider, or correct its address "
                        f"in the federation file"
                    ) from error
                if next_at >= deadline:
                    raise DeadlineExceededError(
                        f"no answer from {self._name} within {self._deadline_s:g} s (last: {error}). Is it running? "
                        f"RemoteConfig(deadline_s=...) waits longer."
                    ) from error
                self._notify(deadline, str(error))
                self.closed.wait(pause_s)

    def _round_trip(
        self,
        message: wire.Execute | wire.Effect,
        payload: MaskedRows | None,
        outputs: int,
        deadline: float,
        meanwhile: Callable[[], None],
    ) -> Tensor:
        if payload is not None and type(payload) is not MaskedRows:
            raise TypeError("only MaskedRows can be sent to a provider (tenant.core.masked)")
        if self.connection is None:  # a provider that has left may have other limits and layers now
            self._connect(deadline)
        if self._permit:  # not before the wait for a connection, in which a provider may be quarantined
            self._permit(self.peer, payload)
        connection = self.connection
        assert connection is not None
        words = None if payload is None else payload.masked_words
        if self._wiretap:
            self._wiretap.sent(self.peer, message, _as_sent(message, words))
        connection.send(message, words, deadline=deadline)
        meanwhile()
        return self._receive(message, outputs, connection, deadline)

    def _repeat(self, request: RepeatedRequest, meanwhile: Callable[[], None], deadline: float) -> Tensor:
        frames, nonce, rows, answer = request
        if type(rows) is not MaskedRows:
            raise TypeError("only MaskedRows can be sent to a provider (tenant.core.masked)")
        if self._permit:
            self._permit(self.peer, rows)
        connection = self.connection
        if connection is None or (stream := connection.stream) is None:
            raise ConnectionLostError(f"the connection to {self._name} was lost")
        encoding, words = frames.encoding, rows.masked_words
        if self._wiretap:  # it may keep the words, whose memory is used again
            self._wiretap.sent(self.peer, frames.message(nonce), _as_sent(frames.message(nonce), words.clone()))
        head, payload = frames.request[0] + nonce + frames.request[1], encoding.pack(words)
        try:
            stream.send_frame(head, payload, deadline=deadline)
            self.traffic.bytes_sent += len(head) + len(payload)
            meanwhile()
            head, entries = frames.answer[0] + nonce + frames.answer[1], answer.numpy()
            space = encoding.payload_space(entries)
            known = not self._wiretap and stream.receive_known(head, space, deadline=deadline)
        except (OSError, ConnectionLostError) as error:
            raise connection.named(error) from error
        if not known:
            return self._receive(frames.message(nonce), frames.outputs, connection, deadline)
        encoding.unpack_in_place(entries)
        self.traffic.bytes_received += len(head) + len(space)
        self.traffic.round_trips += 1
        self.used_at = time.monotonic()
        return answer

    def _receive(
        self, message: wire.Execute | wire.Effect, outputs: int, connection: ClientConnection, deadline: float
    ) -> Tensor:
        encoding = message.encoding
        entries = self._buffers.array(message.rows, outputs, dtype=encoding.items)
        space = encoding.payload_space(entries)
        reply, payload_size = connection.receive(max_payload=len(space), deadline=deadline)
        filled = isinstance(reply, wire.Result)
        if payload_size != (len(space) if filled else 0):
            raise ProtocolError(
                f"{self._name} sent {payload_size} bytes of payload instead of {len(space) if filled else 'none'}"
            )
        if filled:
            connection.fill(space, deadline=deadline)
            connection.uncover(reply, space)
            encoding.unpack_in_place(entries)
        answer = torch.from_numpy(entries)
        if self._wiretap:
            self._wiretap.received(self.peer, reply, answer if filled else None)
        self.traffic.round_trips += 1
        if isinstance(reply, wire.Failure | wire.Result) and reply.limit is not None:
            self._notices.limited(self.peer.name, reply.limit)
        if isinstance(reply, wire.Failure):
            if reply.code in wire.RETRYABLE:
                limit = "" if reply.limit is None else f": it limits you to {reply.limit}"
                raise ConnectionLostError(f"{self._name} is {reply.code}{limit}")
            raise ProviderError(code=reply.code, provider=self.peer.name, detail=reply.detail)
        if not isinstance(reply, wire.Result) or not reply.answers(message):
            raise ProtocolError(f"{self._name} answered another request than the one that was sent")
        return answer

    def _connect(self, deadline: float) -> wire.Welcome:
        if (welcome := self.probe()) is not None:
            return welcome
        self._drop()
        if self.closed.is_set():
            raise ConnectionLostError(f"the channel to {self._name} is closed")
        connection = self.connection = self.peer.connection(self._context, traffic=self.traffic, waiting=self._notify)
        if self.closed.is_set():  # `close` ran before this connection existed
            connection.shut()
        connection.open(deadline)
        try:
            reply, _ = connection.expect(wire.Welcome, self._hello, deadline=deadline)
        except ProviderError as error:
            if error.code in wire.RETRYABLE:
                raise ConnectionLostError(f"{self._name} is {error.code}") from error
            if error.code == wire.ErrorCode.BAD_REQUEST and self.peer.role == "helper":
                raise ProviderError(
                    code=error.code,
                    provider=self.peer.name,
                    detail="its release has no ML-KEM-768, and seeds for `pad` are sent under X25519 and ML-KEM-768 "
                    "only: ask its operator to upgrade it",
                ) from error
            raise
        if reply.model_digest != self._hello.model_digest:
            raise ProtocolError(f"{self._name} does not serve the pinned model")
        if self.peer.role == "helper":
            connection.agree(deadline=deadline)
        self._welcome = reply
        return reply

    def _notify(self, deadline: float, why: str) -> None:
        if self._wanted is None or self._wanted():
            self._notices.waiting(self._name, since=self._began, until=deadline, why=why)

    def _drop(self) -> None:
        self._welcome = None
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def _as_sent(message: wire.Binding, words: Tensor | None) -> Tensor | None:  # in a narrow ring, only the low bits
    if words is None or message.encoding.item_bits == wire.RING32.item_bits:
        return words
    return message.encoding.unpack(message.encoding.pack(words), rows=len(words))


fresh_nonce: Final = partial(os.urandom, wire.NONCE_BYTES)
"""Returns random bytes that bind an answer to its request."""
