"""Providers in memory, behind the tenant's one seam to the network: `Peer.connection`.

A `Network` takes the place of the sockets: a connection to the address of one of its providers passes frames to that
provider and reads its replies, in the caller's thread, without TLS, sockets, threads or processes. Frames, limits,
deadlines and the comparison of certificates with pins are those of the product; the providers multiply real weights,
and record every byte that they hear. A test changes their `behaviour`, and so plays a provider that lies, refuses, is
silent or leaves. With a `Clock`, a wait for a silent provider takes no time: the clock is set forward to its deadline.

What concerns TLS, sockets or processes uses `tests.tenant.scripted.ListeningProvider` or real providers.
"""

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from torch import Tensor

from provider.products.model import ServedModel
from symbiosis_priv.certificates.reading import Identity, load_pin
from symbiosis_priv.errors import ConnectionLostError, ProtocolError
from symbiosis_priv.federation import Peer
from symbiosis_priv.network import stream, tls, wire
from symbiosis_priv.network.dial import ClientConnection
from symbiosis_priv.network.hybrid import Sealing, answer_offer
from symbiosis_priv.network.stream import FrameStream

TIMEOUT_S = 20.0


class Silence(Enum):
    SILENCE = "no reply, ever"


SILENCE: Final = Silence.SILENCE


@dataclass
class Heard:
    """A received request with its rows. (A helper's rows are expanded from the seed, and its request and header are
    those before the seed was sealed.)"""

    request: wire.Execute | wire.Effect
    header: bytes
    payload: bytes
    rows: Tensor


Said = bytes | None | Literal[Silence.SILENCE]
"""The bytes of a reply, None to close the connection, or silence."""
Behaviour = Callable[[Heard, wire.Result, Tensor], tuple[wire.Message, Tensor] | Said]
"""(request, honest header, honest matrix) -> the message or the bytes to send, None or silence."""


def frame(message: wire.Message, payload: Tensor | None = None) -> bytes:
    encoding = message.encoding if isinstance(message, wire.Binding) else wire.RING32
    body = b"" if payload is None else bytes(encoding.pack(payload.contiguous()))
    return wire.encode(message, payload_bytes=len(body)) + body


def honest(heard: Heard, reply: wire.Result, answer: Tensor) -> tuple[wire.Result, Tensor]:
    return reply, answer


class Clock:
    """A clock in place of `time.monotonic`, which `skip` sets forward."""

    def __init__(self) -> None:
        self._real, self._skipped = time.monotonic, 0.0

    def __call__(self) -> float:
        return self._real() + self._skipped

    def skip_to(self, moment: float) -> None:
        self._skipped += max(0.0, moment - self())


@dataclass
class Network:
    """The providers of a test by address."""

    authority: Identity  # signs tenants' certificates
    clock: Clock | None = None
    listens: bool = False  # new providers have sockets
    at: dict[tuple[str, int], "ScriptedProvider"] = field(default_factory=dict)

    @contextmanager
    def replacing_sockets(self) -> Iterator[None]:
        """Lead connections to the addresses of these providers to them. Other connections are real."""
        real = Peer.connection

        def connection(peer: Peer, context: Any, **options: Any) -> ClientConnection:
            own = real(peer, context, **options)
            if peer.remote_only or (peer.host, peer.port) not in self.at:
                return own
            own.__class__ = _Connection  # the fields are those of a real connection
            own.network = self  # type: ignore[attr-defined]
            return own

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Peer, "connection", connection)
            if self.clock is not None:
                patch.setattr(time, "monotonic", self.clock)
            yield


class _Connection(ClientConnection):
    network: Network

    def open(self, deadline: float) -> None:
        provider = self.network.at.get((self.host, self.port))
        if provider is None or provider.closing.is_set():
            error = ConnectionRefusedError("Connection refused")
            raise ConnectionLostError(f"cannot reach {self.name}: {error}") from error
        if self._shut or provider.refuse_connections:
            raise ConnectionLostError(f"no connection with {self.name}")
        self.stream = provider.accept(self.network.clock)
        self.stream.waiting = self._waited
        try:
            tls.check_pin(self.stream.tls, pins=self.pins or ())
        except BaseException:
            self.close()
            raise

    def shut(self) -> None:
        self._shut = True
        if (line := self.stream) is not None:
            line.close()

    def close(self) -> None:
        if (line := self.stream) is not None:
            line.close()
        self.stream = self._sealing = None


class _Shown:
    def __init__(self, identity: Identity) -> None:
        self._certificate = load_pin(identity.certificate).public_bytes(Encoding.DER)
        self._finished = os.urandom(12)

    def getpeercert(self, *, binary_form: bool) -> bytes:
        return self._certificate

    def get_channel_binding(self, _: str) -> bytes:
        return self._finished


class Sealed:
    """A provider's end of a connection: its TLS, and its key for seeds and effects."""

    def __init__(self, tls: Any) -> None:
        self.tls = tls
        self.sealing: Sealing | None = None

    def covered(self, data: bytes) -> bytes:
        """An answer to a request for an effect, with its payload under the key of the connection."""
        size = wire.PREFIX.size
        start = size + wire.PREFIX.unpack(data[:size])[1] if len(data) > size else 0
        with suppress(ProtocolError):  # what is no answer is sent as it is
            reply = wire.decode_reply(data[size:start])
            if isinstance(reply, wire.Result) and self.sealing is not None:
                return data[:start] + self.sealing.cover(reply.nonce, memoryview(data[start:]))
        return data


class _Line(FrameStream):
    """The tenant's end of a connection. A request is heard when it is sent, and answered when its answer is awaited."""

    def __init__(self, provider: "ScriptedProvider", identity: Identity, clock: Clock | None) -> None:
        self._provider, self._clock = provider, clock
        self.tls: Any = _Shown(identity)
        self._end = Sealed(self.tls)
        self._replies = deque[Callable[[], Said]]()
        self._inbox = bytearray()
        self.ended = False
        self._changed = threading.Condition()

    def send_frame(self, head: bytes, payload: memoryview, *, deadline: float) -> None:
        if self.ended:
            raise BrokenPipeError("Broken pipe")
        self._replies.append(self._provider.hear(bytes(head) + bytes(payload), self._end))

    def recv_into(self, buffer: memoryview, deadline: float) -> int:
        while not self._inbox:
            if self.ended:
                return 0
            if self._replies:
                reply = self._replies.popleft()()
                if reply is None:
                    self.close()
                elif reply is not SILENCE:
                    self.say(reply)
            else:
                self._wait_until(deadline)
        count = min(len(buffer), len(self._inbox))
        buffer[:count] = self._inbox[:count]
        del self._inbox[:count]
        self._received += count
        return count

    def _wait_until(self, deadline: float) -> None:
        why = "it has not answered yet"
        if self._clock is not None:
            self._clock.skip_to(deadline)
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError(why)
        with self._changed:
            changed = self._changed.wait_for(lambda: self.ended or self._inbox, min(left, stream.SLICE_S))
        if not changed and self.waiting is not None:
            self.waiting(deadline, why)

    def say(self, data: bytes) -> None:
        with self._changed:
            self._inbox += data
            self._changed.notify_all()

    def _poll(self, until: float) -> None:
        """Nothing arrives while nobody waits."""

    def peer_left(self) -> bool:
        return self.ended

    def close(self) -> None:
        with self._changed:
            self.ended = True
            self._changed.notify_all()


_ports = itertools.count(1)


class ScriptedProvider:
    """Answers as `behaviour` decides, and records requests in `heard`. `model`: the weights that it multiplies by.
    `max_rows`, `max_payload`: limits that it announces and enforces, of rows and bytes."""

    def __init__(
        self,
        model: ServedModel,
        identity: Identity,
        network: Network,
        *,
        max_rows: int = 4096,
        max_payload: int = 1 << 24,
    ) -> None:
        self.behaviour: Behaviour = honest
        self.heard: list[Heard] = []
        self.hellos: list[wire.Hello] = []
        self.refusal: Callable[[wire.Hello], wire.Failure | None] = lambda _: None
        self.clock_ahead_s = 0.0
        self.refuse_connections = False
        self.closing = threading.Event()
        self.certificate = identity.certificate
        self._model, self.served, self.max_rows, self._max_payload = model, model.served, max_rows, max_payload
        self._network = network
        self.lines: list[Any] = []
        self.show(identity)
        self.port = self._begin()

    def _begin(self) -> int:
        """Become reachable. Returns the port."""
        port = next(_ports)
        self._network.at["127.0.0.1", port] = self
        return port

    @property
    def executed(self) -> list[Heard]:
        return [h for h in self.heard if isinstance(h.request, wire.Execute)]

    @property
    def effects(self) -> list[Heard]:
        return [h for h in self.heard if isinstance(h.request, wire.Effect)]

    def peer(self, role: wire.Role, *, name: str | None = None, operator: str | None = None) -> Peer:
        name = name or f"{role} {self.port}"
        return Peer(name, operator or f"operator of {name}", role, "127.0.0.1", self.port, self.certificate)

    def product(self, heard: Heard, *, index: int | None = None) -> Tensor:
        """The honest answer, or the honest answer of another layer group."""
        request = heard.request
        with _ONE_PRODUCT:
            return self._model.product(
                heard.rows,
                index=request.group if index is None else index,
                direction=request.direction,
                arithmetic=request.arithmetic,
                counts=request.counts,
            )

    def show(self, identity: Identity) -> None:
        """Use this certificate on later connections."""
        self._identity = identity

    def accept(self, clock: Clock | None) -> _Line:
        line = _Line(self, self._identity, clock)
        self.lines.append(line)
        return line

    def say(self, data: bytes) -> None:
        """Send bytes on the latest connection."""
        self.lines[-1].say(data)

    def hang_up(self) -> None:
        """Close every connection, as a crash would."""
        lines, self.lines = self.lines, []
        for line in lines:
            line.close()

    def finish(self) -> None:
        """Check that the tenant has closed all connections: every byte is in `heard`."""
        lines, self.lines = self.lines, []
        assert all(line.ended for line in lines), "a tenant has left a connection open"

    def close(self) -> None:
        self.closing.set()
        self.hang_up()

    def hear(self, data: bytes, end: Sealed) -> Callable[[], Said]:
        """Take a frame in. Returns the function that answers it."""
        size = wire.PREFIX.size
        header_size, _ = wire.decode_prefix(data[:size], max_payload=self._max_payload)
        head, payload = data[: size + header_size], data[size + header_size :]
        request = wire.decode_request(head[size:])
        if not isinstance(request, wire.Execute | wire.Effect):
            return lambda: self._reply(request, end)
        if isinstance(request, wire.Effect):
            assert end.sealing is not None
            canonical, request = head == wire.encode(request), end.sealing.opened(request)
            head = wire.encode(request) if canonical else head
        if request.group not in self.served:
            return lambda: frame(wire.Failure(code=wire.ErrorCode.NOT_SERVED, detail="not these layers"))
        if request.rows > self.max_rows:
            return lambda: frame(wire.Failure(code=wire.ErrorCode.TOO_LARGE, detail="too many rows"))
        if isinstance(request, wire.Execute):
            rows = request.encoding.unpack(bytearray(payload), rows=request.rows)
            if not request.rows:
                entry = self._model.manifest.entry(request.group, by_expert=request.counts is not None)
                rows = rows.reshape(0, entry.columns(request.direction)[0])
        else:
            rows = self._model.mask_rows(request)
        heard = Heard(request, head, payload, rows)
        self.heard.append(heard)
        return lambda: self._answer(heard, end)

    def _reply(self, request: wire.Request, end: Sealed) -> Said:
        match request:
            case wire.Hello():
                self.hellos.append(request)
                if (refusal := self.refusal(request)) is not None:
                    return frame(refusal)
                return frame(
                    wire.Welcome(
                        version=request.version,
                        model_digest=self._model.manifest.digest,
                        first_group=self.served.start,
                        end_group=self.served.stop,
                        max_rows=self.max_rows,
                        max_payload=self._max_payload,
                    )
                )
            case wire.KeyShare():
                answer, end.sealing = answer_offer(request, end.tls)
                return frame(answer)
            case wire.FetchHealth():
                return frame(
                    wire.HealthReport(
                        name="scripted",
                        model_digest=self._model.manifest.digest,
                        time=time.time() + self.clock_ahead_s,
                        uptime_s=1.0,
                        groups=len(self.served),
                        groups_loaded=0,
                        requests=len(self.heard),
                        connections=len(self.lines),
                    )
                )
        raise AssertionError(request)

    def _answer(self, heard: Heard, end: Sealed) -> Said:
        request = heard.request
        reply = self.behaviour(heard, wire.Result.answering(request), self.product(heard))
        if reply is None or isinstance(reply, Silence):
            return reply
        data = reply if isinstance(reply, bytes) else frame(*reply)
        return end.covered(data) if isinstance(request, wire.Effect) else data


_ONE_PRODUCT = threading.Lock()  # providers share the model
