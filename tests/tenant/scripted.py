"""Providers in this process that are honest unless a test changes their behaviour, and the products that they are asked
for.

A `ScriptedProvider` sends real frames over TLS and records every byte that it receives. So a test can play a dishonest
or absent provider, and can see what a provider sees of a tenant.
"""

import contextlib
import functools
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from provider.products.model import ServedModel
from symbiosis_priv.arithmetic.keystream import expand, relay_key
from symbiosis_priv.arithmetic.ring import FORWARD, Direction, quantise_rows
from symbiosis_priv.certificates.reading import Identity, fingerprint, sign
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ProtocolError
from symbiosis_priv.federation import Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from symbiosis_priv.network.block_statement import block_id, statement
from symbiosis_priv.network.hybrid import Sealing, answer_offer
from symbiosis_priv.network.tls import server_context
from tenant.preparation.prepared import Preparation
from tenant.session.session import Session

TIMEOUT_S = 20.0


@dataclass
class Heard:
    """A received request with its rows. (A helper's rows are expanded from the seed, and its request and header are
    those before the seed was sealed.)"""

    request: wire.Execute | wire.Effect
    header: bytes
    payload: bytes
    rows: Tensor


Behaviour = Callable[[Heard, wire.Result, Tensor], tuple[wire.Message, Tensor] | bytes | None]
"""(request, honest header, honest matrix) -> the message or the bytes to send, or None to close the connection.

The matrix of a relayed effect is the block, and that of an answer to a request with blocks has them subtracted.
"""
Stored = tuple[wire.Block | wire.Failure, bytes]
"""A block as an executor keeps it, and its payload; or a refusal."""


def frame(message: wire.Message, payload: Tensor | None = None) -> bytes:
    encoding = message.encoding if isinstance(message, wire.Binding) else wire.RING32
    body = b"" if payload is None else bytes(encoding.pack(payload.contiguous()))
    return wire.encode(message, payload_bytes=len(body)) + body


def honest(heard: Heard, reply: wire.Result, answer: Tensor) -> tuple[wire.Result, Tensor]:
    return reply, answer


class ScriptedProvider:
    """Answers as `behaviour` decides, and records requests in `heard`.

    Args:
        model: the weights that it multiplies by.
        identity: its certificate and key.
        authority: the authority that signs tenants' certificates.
        others: the providers of the test by fingerprint, among them the executors to which it relays.
        max_rows: row limit that it announces and enforces.
        max_payload: byte limit that it announces and enforces.

    Attributes:
        blocks: the blocks that it keeps as an executor.
        evidence: what it hands out of a block that the tenant fetches; None to close the connection.
        deposits: changes a block before it is signed, as a helper.
        signs_as: the provider whose key signs its blocks.
        block_wait_s: how long it waits for a block as an executor.
        permit_wait_s: how long it takes to issue a permit.
        max_bytes: bytes of a tenant's blocks, which it announces and does not enforce.
    """

    def __init__(
        self,
        model: ServedModel,
        identity: Identity,
        authority: Identity,
        others: dict[str, "ScriptedProvider"],
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
        self.blocks: dict[bytes, tuple[wire.Block, bytes]] = {}
        self.evidence: Callable[[tuple[wire.Block, bytes]], Stored | None] = lambda stored: stored
        self.deposits: Callable[[wire.Block, bytes], tuple[wire.Block, bytes]] = lambda *block: block
        self.signs_as = self
        self.takes_blocks = True
        self.block_wait_s = 0.3
        self.permit_wait_s, self.permits_asked = 0.0, 0
        self.max_bytes = 1 << 30
        self._model, self._served, self._max_rows, self._max_payload = model, model.served, max_rows, max_payload
        self._authority, self._others = authority, others
        self.fingerprint = fingerprint(identity.certificate)
        others[self.fingerprint] = self
        self.show(identity)
        self._lock = threading.Lock()
        self._connections: list[ssl.SSLSocket] = []
        self._serving: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def executed(self) -> list[Heard]:
        return [h for h in self.heard if isinstance(h.request, wire.Execute)]

    @property
    def effects(self) -> list[Heard]:
        return [h for h in self.heard if isinstance(h.request, wire.Effect)]

    def peer(self, role: wire.Role, *, name: str | None = None, operator: str | None = None) -> Peer:
        name = name or f"{role} {self.port}"
        return Peer(name, operator or f"operator of {name}", role, "127.0.0.1", self.port, self.certificate)

    def product(self, heard: Heard, *, group: int | None = None) -> Tensor:
        """The honest answer, or the honest answer of another layer group."""
        request = heard.request
        with _ONE_PRODUCT:
            return self._model.product(
                heard.rows,
                group=request.group if group is None else group,
                direction=request.direction,
                arithmetic=request.arithmetic,
                counts=request.counts,
            )

    def show(self, identity: Identity) -> None:
        """Use this certificate on later connections."""
        self._key = identity.private_key()
        self._context = _context(identity, self._authority)

    def say(self, data: bytes) -> None:
        """Send bytes on the latest connection."""
        self._connections[-1].sendall(data)

    def hang_up(self) -> None:
        """Close every connection, as a crash would."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def finish(self) -> None:
        """Wait until all bytes of closed connections are in `heard`."""
        with self._lock:
            serving, self._serving = self._serving, []
        for thread in serving:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a tenant has left a connection open"

    def close(self) -> None:
        self.closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        for thread in (self._accepting, *self._serving):
            thread.join(TIMEOUT_S)

    def _accept(self) -> None:
        while not self.closing.is_set():
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse_connections:
                raw.close()
                continue
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._serve, args=(raw,), daemon=True)
            with self._lock:  # so `finish` waits for this thread, and only for threads that have started
                thread.start()
                self._serving.append(thread)

    def _serve(self, raw: socket.socket) -> None:
        with contextlib.suppress(OSError, ConnectionError), raw:
            raw.settimeout(TIMEOUT_S)
            with self._context.wrap_socket(raw, server_side=True) as connection:
                connection.settimeout(None)
                with self._lock:
                    self._connections.append(connection)
                sealings: list[Sealing] = []  # of this connection, after its keys
                while not self.closing.is_set() and self._answer(connection, sealings):
                    pass

    def _answer(self, connection: ssl.SSLSocket, sealings: list[Sealing]) -> bool:
        prefix = _exactly(connection, wire.PREFIX.size)
        header_size, payload_size = wire.decode_prefix(prefix, max_payload=self._max_payload)
        header = _exactly(connection, header_size)
        payload = _exactly(connection, payload_size)
        request = wire.decode_request(header)
        if isinstance(request, wire.Hello):
            self.hellos.append(request)
            if (refusal := self.refusal(request)) is not None:
                connection.sendall(frame(refusal))
                return True
            welcome = wire.Welcome(
                version=request.version,
                model_digest=self._model.manifest.digest,
                first_group=self._served.start,
                end_group=self._served.stop,
                max_rows=self._max_rows,
                max_payload=self._max_payload,
            )
            connection.sendall(frame(welcome))
            return True
        if isinstance(request, wire.KeyShare):
            answer_with_key, sealing = answer_offer(request, connection)
            sealings.append(sealing)
            connection.sendall(frame(answer_with_key))
            return True
        if isinstance(request, wire.FetchHealth):
            report = wire.HealthReport(
                name="scripted",
                model_digest=self._model.manifest.digest,
                time=time.time() + self.clock_ahead_s,
                uptime_s=1.0,
                groups=len(self._served),
                groups_loaded=0,
                requests=len(self.heard),
                connections=len(self._connections),
            )
            connection.sendall(frame(report))
            return True
        if isinstance(request, wire.PermitRequest):
            self.permits_asked += 1
            time.sleep(self.permit_wait_s)
            permit = wire.Permit(
                token=bytes(wire.TOKEN_BYTES),
                helpers=request.helpers if self.takes_blocks else (),
                seconds=600.0,
                block_seconds=600.0,
                max_bytes=self.max_bytes,
            )
            connection.sendall(frame(permit))
            return True
        if isinstance(request, wire.FetchBlock):
            return self._hand_out(connection, request)
        assert isinstance(request, wire.Execute | wire.Effect)
        if isinstance(request, wire.Effect):
            canonical, request = prefix + header == wire.encode(request), sealings[0].opened(request)
            header = wire.encode(request)[wire.PREFIX.size :] if canonical else header
            prefix = wire.encode(request)[: wire.PREFIX.size] if canonical else prefix
        if request.group not in self._served:
            connection.sendall(frame(wire.Failure(code=wire.ErrorCode.NOT_SERVED, detail="not these layers")))
            return True
        if request.rows > self._max_rows:
            connection.sendall(frame(wire.Failure(code=wire.ErrorCode.TOO_LARGE, detail="too many rows")))
            return True
        if isinstance(request, wire.Execute):
            rows = request.encoding.unpack(bytearray(payload), rows=request.rows)
            if not request.rows:
                entry = self._model.manifest.entry(request.group, by_expert=request.counts is not None)
                rows = rows.reshape(0, entry.columns(request.direction)[0])
        else:
            rows = self._model.mask_rows(request)
        heard = Heard(request, prefix + header, payload, rows)
        self.heard.append(heard)
        answer, relayed = self.product(heard), False
        if isinstance(request, wire.Execute):
            answer, relayed = self._subtract_blocks(request, answer)
        elif to := self._relayed_to(request):
            answer = answer + self._second(request)
        reply = self.behaviour(heard, wire.Result.answering(request, relayed=relayed), answer)
        if reply is None:
            return False
        data = reply if isinstance(reply, bytes) else frame(*reply)
        if isinstance(request, wire.Effect) and to:
            data = self._deposit(to, request, data)
        elif isinstance(request, wire.Effect):
            data = _covered(sealings[0], data)
        connection.sendall(data)
        return True

    # Relay

    def _relayed_to(self, request: wire.Effect) -> "ScriptedProvider | None":
        to = request.relay and self._others.get(request.relay.executor)
        return to if to and to.takes_blocks else None

    def _second(self, request: wire.Effect) -> Tensor:
        entry = self._model.manifest.entry(request.group, by_expert=request.counts is not None)
        key = relay_key(request.seed, group_name=entry.name, direction=request.direction)
        return expand(key, first_row=request.first_row, rows=request.rows, width=entry.columns(request.direction)[1])

    def _deposit(self, to: "ScriptedProvider", request: wire.Effect, reply: bytes) -> bytes:
        """Sign the payload of a reply and give it to an executor. Replies without a payload stay as they are."""
        header_size, size = wire.decode_prefix(reply[: wire.PREFIX.size], max_payload=self._max_payload)
        if not size or request.relay is None:
            return reply
        body = reply[wire.PREFIX.size + header_size :]
        permit, nonce = request.relay.permit, block_id(request)
        fields = {name: getattr(request, name) for name in wire.Binding.__struct_fields__} | {"nonce": nonce}
        signer = self.signs_as
        block, body = self.deposits(
            wire.Block(**fields, helper=signer.fingerprint, permit=permit, signature=b"-"), body
        )
        signature = sign(signer._key, statement(block, permit=permit, executor=to.fingerprint, payload=body))
        to.blocks[nonce] = msgspec.structs.replace(block, signature=signature), body
        return frame(wire.Result.answering(request, relayed=True))

    def _subtract_blocks(self, request: wire.Execute, answer: Tensor) -> tuple[Tensor, bool]:
        deadline = time.monotonic() + self.block_wait_s
        while any(rows.block not in self.blocks for rows in request.blocks) and time.monotonic() < deadline:
            time.sleep(0.002)
        if not request.blocks or any(rows.block not in self.blocks for rows in request.blocks):
            return answer, False
        answer = answer.clone()
        for rows in request.blocks:
            block, body = self.blocks[rows.block]
            matrix = request.encoding.unpack(bytearray(body), rows=block.rows)
            answer[rows.first : rows.first + rows.rows] -= matrix[rows.start : rows.start + rows.rows]
        return answer, True

    def _hand_out(self, connection: ssl.SSLSocket, request: wire.FetchBlock) -> bool:
        stored = self.evidence(self.blocks[request.block])
        if stored is None:
            return False
        block, body = stored
        connection.sendall(wire.encode(block, payload_bytes=len(body)) + body)
        return True


def _covered(sealing: Sealing, data: bytes) -> bytes:
    """An answer to a request for an effect, with its payload under the key of the connection."""
    start = wire.PREFIX.size + wire.PREFIX.unpack(data[: wire.PREFIX.size])[1] if len(data) > wire.PREFIX.size else 0
    with contextlib.suppress(ProtocolError):  # what is no answer is sent as it is
        reply = wire.decode_reply(data[wire.PREFIX.size : start])
        if isinstance(reply, wire.Result):
            return data[:start] + sealing.cover(reply.nonce, memoryview(data[start:]))
    return data


_ONE_PRODUCT = threading.Lock()  # providers share the model


@functools.lru_cache(maxsize=8)
def served_model(store: WeightStore) -> ServedModel:
    """The model that providers share, because loading it takes longer than the products of most tests."""
    return ServedModel(store, float_memory=1 << 30)


@functools.lru_cache(maxsize=64)
def _context(identity: Identity, authority: Identity) -> ssl.SSLContext:
    return server_context(certificate=identity.certificate, key=identity.key, tenant_authority=authority.certificate)


def _exactly(connection: ssl.SSLSocket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return bytes(data)


# Products


def ring_rows(preparation: Preparation, index: int, direction: Direction, count: int, *, seed: int = 0) -> Tensor:
    """Quantised rows, as a backend passes them on."""
    facts = preparation.facts[index]
    rows = torch.randn(count, facts.inputs(direction), generator=torch.Generator().manual_seed(seed))
    return quantise_rows(rows, facts.bounds[direction])[0]


def product_of(store: WeightStore, index: int, direction: Direction, rows: Tensor) -> Tensor:
    """The product modulo 2^32. Sums are exact in double precision: they have fewer than 53 bits."""
    return (rows.double() @ _factor(store, index, direction)).to(torch.int64).to(torch.int32)


@functools.lru_cache(maxsize=64)
def _factor(store: WeightStore, index: int, direction: Direction) -> Tensor:
    weight = store.group(index).weight.double()
    return weight.t() if direction == FORWARD else weight


def store_of(session: Session) -> WeightStore:
    """The checkpoint that a session of `new_session` was given."""
    assert session._store is not None
    return session._store


def is_right(session: Session, index: GroupIndex, direction: Direction, count: int, seed: int = 0) -> bool:
    """Returns True if a session's product has the right bits."""
    rows = ring_rows(session.preparation, index, direction, count, seed=seed)
    return torch.equal(session.product(index, direction, rows), product_of(store_of(session), index, direction, rows))


# Behaviours


def spoil(heard: Heard, reply: wire.Result, answer: Tensor) -> tuple[wire.Result, Tensor]:
    """A wrong answer."""
    answer[0, 0] += 1
    return reply, answer


def silent(provider: "ScriptedProvider", asked: threading.Event | None = None) -> Behaviour:
    """No answer until the provider closes; `asked` is set when a request has come."""

    def say_nothing(heard: Heard, reply: wire.Result, answer: Tensor) -> None:
        if asked is not None:
            asked.set()
        provider.closing.wait()

    return say_nothing


def together(count: int) -> Behaviour:
    """Answers no request before `count` requests have arrived, at all providers with this behaviour."""
    all_here = threading.Barrier(count)

    def behave(heard: Heard, reply: wire.Result, answer: Tensor) -> tuple[wire.Result, Tensor]:
        all_here.wait(TIMEOUT_S)
        return reply, answer

    return behave
