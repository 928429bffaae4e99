"""One TLS connection to one provider in one role: a request goes out, its answer comes back, or the deadline passes.

A request is a fixed run of bytes. `attempt` sends it once. `request` persists: if the connection breaks or the provider
is busy, the *same bytes* are sent again on a new one, until the deadline. Providers keep no state between requests, so
this is safe, and it never draws a second mask for the same row (rule 3). Memory for an answer is as large as the
request makes it, whatever comes, and is taken while the answer is under way; what has come is checked against the
request that it should answer (rule 7) before it is used. Waiting is always bounded by the request's deadline, and
`tenant.connections.notices` may say what is being waited for.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from torch import Tensor

from symbiosis_priv.arithmetic.buffers import Buffers
from symbiosis_priv.errors import (
    ConnectionLostError,
    DeadlineExceededError,
    ProtocolError,
    ProviderError,
    TransportError,
)
from symbiosis_priv.federation import Peer
from symbiosis_priv.network import tls, wire
from symbiosis_priv.network.dial import ClientConnection, Traffic
from tenant.connections.notices import Notices
from tenant.core.masked import MaskedRows
from tenant.worker import Worker

DEADLINE_OPTION = "RemoteConfig(deadline_s=...)"

P = ParamSpec("P")
T = TypeVar("T")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 1.0


def _always() -> bool:
    return True


class Wiretap(Protocol):
    """Sees every frame exactly as it is on the wire, below encryption: for reviewers, attacks and tests.

    `payload` is the frame's matrix. A tap may change a received payload in place, as a dishonest provider would.
    """

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """A request is about to leave."""

    def received(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """A reply has arrived and nothing has looked at it yet."""


class Channel:
    """A connection that comes back by itself. Threads that share one wait for each other.

    Args:
        peer: whom to connect to, and the pinned certificate.
        certificate: the tenant's certificate.
        key: its private key.
        model_digest: what the provider must serve.
        deadline_s: how long one request may take, reconnecting included.
        buffers: where answers lie; memory of their own if None.
        notices: tells the user what is being waited for, and names the option for `deadline_s`.
        wiretap: an observer of every frame, or None.
        permit: called before every request leaves, with the provider and the rows; raises if it must not leave.
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
        permit: Callable[[Peer, MaskedRows | None], None] | None = None,
    ) -> None:
        self.peer = peer
        self.traffic = Traffic()
        self.worker = Worker(f"{peer.role}-{peer.name}")
        self._hello = wire.Hello(version=wire.VERSION, role=peer.role, model_digest=model_digest)
        self._context = tls.client_context(certificate=certificate, key=key, pins=peer.pins)
        self._deadline_s = deadline_s
        self._buffers = buffers or Buffers(limit=0)
        self._notices = notices or Notices(option=DEADLINE_OPTION)
        self._wiretap = wiretap
        self._permit = permit
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._name = f"{peer.role} {peer.name!r} at {peer.host}:{peer.port}"
        self._line: ClientConnection | None = None
        self._began = 0.0
        self._wanted: Callable[[], bool] = _always
        self._welcome: wire.Welcome | None = None

    @property
    def line(self) -> ClientConnection | None:
        """The connection as it is now, if there is one."""
        return self._line

    @property
    def closed(self) -> bool:
        """Whether this side has closed it: then nobody else is to blame for what fails."""
        return self._closed.is_set()

    def welcome(self, *, wanted: Callable[[], bool] = _always, refused_s: float = math.inf) -> wire.Welcome:
        """The provider's limits; connects if need be.

        Args:
            wanted: whether anybody waits for it. If not, nothing is said about it, and it is not tried again.
            refused_s: seconds after which a connection that is still refused is not tried again.

        Raises:
            ConnectionLostError: nothing listens at the address.
        """
        return self._used(self._persist, self._connect, wanted=wanted, refused_s=refused_s)

    def connect(
        self, *, deadline: float, since: float | None = None, wanted: Callable[[], bool] = _always
    ) -> wire.Welcome:
        """Connects if need be, without a second try. Returns the provider's limits; see `attempt`."""
        return self._used(self._once, self._connect, deadline, began=since, wanted=wanted)

    def probe(self) -> wire.Welcome | None:
        """The provider's limits, without waiting: None if there is no connection, or the provider has closed it."""
        with self._lock:
            return self._probe()

    def request(self, message: wire.Execute | wire.Effect, payload: MaskedRows | None, *, outputs: int) -> Tensor:
        """Send a request and wait for its answer.

        Args:
            message: the header; `message.nonce` must be fresh.
            payload: the rows for `Execute`, None for `Effect`. Raw tensors are refused (`tenant.core.masked`).
            outputs: columns of the answer.

        Returns:
            CPU matrix `[rows, outputs]`, int32 or float32 after the message's arithmetic. Unverified.

        Raises:
            DeadlineExceededError: no answer in time.
            ProviderError: the provider refused.
            ProtocolError: the answer is malformed or answers another request.
            TypeError: the payload is not `MaskedRows`; nothing was sent.
        """

        def connect_and_ask(deadline: float) -> Tensor:
            self._connect(deadline)
            return self._round_trip(message, payload, outputs, deadline)

        return self._used(self._persist, connect_and_ask)

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
        """The same, tried once, right after it was heard: whether the provider has left is not looked at again.

        Args:
            deadline: on the clock of `time.monotonic`.
            since: on the same clock, when the first attempt began, for what is said about a long wait.
            meanwhile: called once the request has left, while the answer is under way.

        Raises:
            TransportError: the provider is away, busy or too slow; the same bytes may be sent again, to anybody.
            ProviderError, ProtocolError: as `request` says.
        """

        def ask(deadline: float) -> Tensor:
            return self._round_trip(message, payload, outputs, deadline, meanwhile)

        return self._used(self._once, ask, deadline, began=since)

    def close(self) -> None:
        """Close for good, without waiting: a request in flight in another thread fails. `worker` is the caller's to
        join."""
        self._closed.set()
        self.worker.stop()
        if (line := self._line) is not None:
            line.shut()
        self.drop_if_idle()  # else the request in flight does, as it ends

    def drop_if_idle(self) -> None:
        """Forget a connection that nobody uses just now: the next request makes a new one."""
        if self._lock.acquire(blocking=False):
            self._drop()
            self._lock.release()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connection without a byte on it. This channel is not used again."""
        self._closed.set()
        self._drop()

    def _used(self, how: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
        with self._lock:
            result = how(*arguments, **named)
        if self._closed.is_set():  # while the answer was already here: `close` has found the lock taken
            self.drop_if_idle()
        return result

    def _once(
        self,
        attempt: Callable[[float], T],
        deadline: float,
        *,
        began: float | None = None,
        wanted: Callable[[], bool] = _always,
    ) -> T:
        self._began = time.monotonic() if began is None else began
        self._wanted = wanted
        try:
            result = attempt(deadline)
        except BaseException as error:
            self._drop()  # the stream may be in the middle of a frame
            if self._closed.is_set() and isinstance(error, TransportError):
                raise self._closed_here() from error
            raise
        self._notices.answered(self._name)
        return result

    def _persist(
        self, attempt: Callable[[float], T], *, wanted: Callable[[], bool] = _always, refused_s: float = math.inf
    ) -> T:
        began = time.monotonic()
        deadline = began + self._deadline_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return self._once(attempt, deadline, began=began, wanted=wanted)
            except TransportError as error:
                if self._closed.is_set() or not wanted():
                    raise
                refused = isinstance(error.__cause__, ConnectionRefusedError)
                if refused and time.monotonic() + pause >= began + refused_s:
                    raise ConnectionLostError(
                        f"nothing listens at the address of {self._name}: start the provider, or correct its address "
                        f"in the federation file"
                    ) from error
                if time.monotonic() + pause >= deadline:
                    raise DeadlineExceededError(
                        f"no answer from {self._name} within {self._deadline_s:g} s (last: {error}). Is it running? "
                        f"{self._notices.option} waits longer."
                    ) from error
                self.traffic.reconnects += 1
                self._say(deadline, str(error))
                self._closed.wait(pause)
                pause = min(2 * pause, _LAST_PAUSE_S)

    def _round_trip(
        self,
        message: wire.Execute | wire.Effect,
        payload: MaskedRows | None,
        outputs: int,
        deadline: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Tensor:
        if payload is not None and type(payload) is not MaskedRows:
            raise TypeError("rows leave as MaskedRows, and as nothing else (tenant.core.masked)")
        if self._permit:
            self._permit(self.peer, payload)
        if self._line is None:
            self._connect(deadline)
        line = self._line
        assert line is not None
        words = None if payload is None else payload.masked_words
        if self._wiretap:
            self._wiretap.sent(self.peer, message, words)
        line.send(message, words, deadline=deadline)
        meanwhile()
        answer = self._buffers.matrix(message.rows, outputs, dtype=message.encoding.dtype)
        reply = self._receive(line, message.encoding.pack(answer), deadline)
        if self._wiretap:
            self._wiretap.received(self.peer, reply, answer if isinstance(reply, wire.Result) else None)
        self.traffic.round_trips += 1
        if isinstance(reply, wire.Failure | wire.Result) and reply.limit is not None:
            self._notices.limited(self.peer.name, reply.limit)
        if isinstance(reply, wire.Failure):
            raise self._failure(reply)
        if not isinstance(reply, wire.Result) or not reply.answers(message):
            raise ProtocolError(f"{self._name} answered another request than the one it was asked")
        return answer

    def _connect(self, deadline: float) -> wire.Welcome:
        if (welcome := self._probe()) is not None:
            return welcome
        self._drop()
        if self._closed.is_set():
            raise ConnectionLostError(f"{self._name} is asked no more")
        line = self._line = ClientConnection(
            self._name,
            host=self.peer.host,
            port=self.peer.port,
            pins=self.peer.pins,
            context=self._context,
            remote_only=self.peer.remote_only,
            traffic=self.traffic,
            waiting=self._say,
        )
        if self._closed.is_set():  # since: `close` has not seen this line
            line.shut()
        line.open(deadline)
        line.send(self._hello, deadline=deadline)
        reply, _ = line.receive(max_payload=0, deadline=deadline)
        if isinstance(reply, wire.Failure):
            raise self._failure(reply)
        if not isinstance(reply, wire.Welcome) or reply.model_digest != self._hello.model_digest:
            raise ProtocolError(f"{self._name} does not serve the pinned model")
        self._welcome = reply
        return reply

    def _probe(self) -> wire.Welcome | None:
        return None if self._line is None or self._line.peer_left() else self._welcome

    def _receive(self, line: ClientConnection, space: memoryview, deadline: float) -> wire.Reply:
        """A reply; the payload of a result is written to `space`."""
        reply, payload_size = line.receive(max_payload=len(space), deadline=deadline)
        if not isinstance(reply, wire.Result):
            if payload_size:
                raise ProtocolError(f"{self._name} sent a payload where none belongs")
            return reply
        if payload_size != len(space):
            raise ProtocolError(f"{self._name} sent {payload_size} bytes where {len(space)} belong")
        line.fill(space, deadline=deadline)
        return reply

    def _say(self, deadline: float, why: str) -> None:
        if self._wanted():
            self._notices.waiting(self._name, since=self._began, until=deadline, why=why)

    def _failure(self, reply: wire.Failure) -> Exception:
        if reply.code in wire.RETRYABLE:
            why = reply.code if reply.limit is None else f"{reply.code}: it limits you to {reply.limit}"
            return ConnectionLostError(f"{self._name} is {why}")
        return ProviderError(code=reply.code, provider=self.peer.name, detail=reply.detail)

    def _closed_here(self) -> ConnectionLostError:
        return ConnectionLostError(f"the connection to {self._name} was closed on this side")

    def _drop(self) -> None:
        self._welcome = None
        if self._line is not None:
            self._line.close()
            self._line = None


def fresh_nonce() -> bytes:
    """16 random bytes that bind an answer to its request."""
    return os.urandom(wire.NONCE_BYTES)
