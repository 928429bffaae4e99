"""The view of each party of a real run.

A `Recorder` at the tenant's connections keeps every frame before encryption and after decryption. Each party's frozen
view is cut from these frames. An attack receives one view and the public model (`public.Public`). The tenant's own
knowledge is in `truth.Truth`, which only the scorer sees.

    executor           every request and answer of the executor role
    helper             every seed, row range and effect of one helper
    executor+helper    the executor and every helper, against the assumption of `pad`
    all but a helper   the executor and every helper except one
    network            times, endpoints and sizes of frames (TLS adds a constant to each record)
    neighbour          another tenant of the same executor: its own rows and answers, and the health reports it gets
    recorder           what TLS carried on all links, and the X25519 secrets of the second key of helpers' links
"""

import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, get_args
from unittest import mock

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import Seed
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.federation import Peer
from symbiosis_priv.network import hybrid, wire

Party = Literal["executor", "helper", "executor+helper", "all but a helper", "network", "neighbour", "recorder"]
PARTIES: tuple[Party, ...] = get_args(Party)


@dataclass(frozen=True, eq=False)
class Exchange:
    """One request to the executor and its answer."""

    order: int  # among all requests of the run, to any provider
    group: int
    direction: Direction
    arithmetic: wire.Arithmetic
    rows: Tensor  # `[r, d]`, int32 on the ring path, float32 otherwise, as received
    answer: Tensor  # `[r, o]`, as sent back
    fields: Mapping[str, object] = field(default_factory=dict)  # every header field


@dataclass(frozen=True, eq=False)
class EffectExchange:
    """One request to a helper and its answer; `effect` is int32 `[rows, o]`."""

    order: int
    helper: str
    group: int
    direction: Direction
    rows: int
    first_row: int
    seed: Seed
    effect: Tensor


@dataclass(frozen=True, eq=False)
class Packet:
    """A frame as an observer of the network sees it: time, endpoint, direction and size."""

    time_s: float
    endpoint: str
    upward: bool
    size: int


@dataclass(frozen=True, eq=False)
class Game:
    """Rows that arrived when the tenant masked one or the other of two rows that the adversary chose: `known` ones,
    `[n, d]`, with `labels` bool `[n]`, and `unknown` ones, which the adversary must tell apart. `shares`: by helper,
    its shares of the pads of `known` and then of `unknown`, int32; coalitions know some of them."""

    known: Tensor
    labels: Tensor
    unknown: Tensor
    shares: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ExecutorView:
    """Everything that an executor receives and computes, and its distinguishing games by direction."""

    exchanges: tuple[Exchange, ...]
    games: Mapping[Direction, Game] = field(default_factory=dict)

    @property
    def ring_bits(self) -> wire.RingBits:
        return 24 if any(e.fields.get("ring_bits") == 24 for e in self.exchanges) else 32

    @property
    def unused_bits(self) -> int:
        """Number of high bits of a word that are not sent. Words shifted left by this number wrap as the ring does."""
        return 32 - self.ring_bits

    def of(self, *, index: int | None = None, direction: Direction | None = None) -> tuple[Exchange, ...]:
        """The exchanges of a group and direction, in order."""
        return tuple(e for e in self.exchanges if index in (None, e.group) and direction in (None, e.direction))


@dataclass(frozen=True, eq=False)
class HelperView:
    effects: tuple[EffectExchange, ...]


@dataclass(frozen=True, eq=False)
class CollusionView:
    """The executor and some helpers combine their logs."""

    executor: ExecutorView
    helpers: tuple[HelperView, ...]


@dataclass(frozen=True, eq=False)
class NetworkView:
    """The view of an observer of the tenant's network. The observer also knows the tenant's options."""

    packets: tuple[Packet, ...]
    ring_bits: wire.RingBits = 32


@dataclass(frozen=True, eq=False)
class NeighbourView:
    """A second tenant's view: float seconds, and the health reports' request counter minus this tenant's own requests;
    and float64 `[n, o]`, its own answers minus the true products."""

    requests: tuple[tuple[float, int], ...]
    own: Tensor


@dataclass(frozen=True, eq=False)
class RecordedLink:
    """A connection with a helper: the exchange of its second key with the tenant's X25519 secret, and every request for
    an effect with the payload of its answer, as TLS carried them. `kem`: the tenant's ML-KEM secret, if it is known."""

    helper: str
    offer: wire.KeyShare
    answer: wire.KeyAnswer
    finished: bytes
    curve: X25519PrivateKey
    kem: MLKEM768PrivateKey | None
    effects: list[tuple[wire.Effect, bytes]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class RecorderView:
    """All links were recorded, and X25519's secrets computed later."""

    executor: ExecutorView
    links: tuple[RecordedLink, ...]


NO_NEIGHBOUR = NeighbourView((), torch.zeros((0, 1)))
"""The view without a second tenant."""


@dataclass(frozen=True, eq=False)
class Views:
    executor: ExecutorView
    helpers: tuple[HelperView, ...]
    network: NetworkView
    neighbour: NeighbourView
    links: tuple[RecordedLink, ...]
    """With ML-KEM's secrets, which `of` leaves out."""

    def of(self, party: Party) -> object:
        views: dict[Party, object] = {
            "executor": self.executor,
            "helper": self.helpers[0] if self.helpers else HelperView(()),
            "executor+helper": CollusionView(self.executor, self.helpers),
            "all but a helper": CollusionView(self.executor, self.helpers[1:]),
            "network": self.network,
            "neighbour": self.neighbour,
            "recorder": RecorderView(self.executor, tuple(replace(link, kem=None) for link in self.links)),
        }
        return views[party]


class Recorder:
    """A `tenant.connections.channel.Wiretap` that records everything. Thread-safe: all connections report to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._waiting: dict[bytes, tuple[int, wire.Message, Tensor | None]] = {}
        self._exchanges: list[Exchange] = []
        self._effects: list[EffectExchange] = []
        self._packets: list[Packet] = []
        self._links: dict[hybrid.Sealing, RecordedLink] = {}
        self._count = 0
        self.last_executed = -1
        """Order of the latest request to an executor. `Witness` files the true rows under this number."""

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        with self._lock:
            self._record_packet(peer, message, payload, upward=True)
            if isinstance(message, wire.Binding):
                self._waiting[message.nonce] = self._count, message, None if payload is None else payload.clone()
                if isinstance(message, wire.Execute):
                    self.last_executed = self._count
                self._count += 1

    @contextmanager
    def recording_links(self) -> Iterator[None]:
        """Inside this block, record the links of this process's tenants with helpers, as TLS carries them."""
        sealing, seal, uncover = hybrid.KeyOffer.sealing, hybrid.Sealing.seal, hybrid.Sealing.uncover

        def agreed(offer: hybrid.KeyOffer, answer: wire.KeyAnswer, connection: ssl.SSLObject) -> hybrid.Sealing:
            finished, made = connection.get_channel_binding("tls-unique") or b"", sealing(offer, answer, connection)
            with self._lock:
                name = f"link {len(self._links)}"
                self._links[made] = RecordedLink(name, offer.message, answer, finished, offer._curve, offer._kem)
            return made

        def sealed(one: hybrid.Sealing, request: wire.Effect) -> wire.Effect:
            sent = seal(one, request)
            with self._lock:
                self._links[one].effects.append((sent, b""))
            return sent

        def uncovered(one: hybrid.Sealing, nonce: bytes, payload: bytearray | memoryview) -> None:
            with self._lock:
                effects = self._links[one].effects
                at = next(i for i, (request, _) in enumerate(effects) if request.nonce == nonce)
                effects[at] = effects[at][0], bytes(payload)
            uncover(one, nonce, payload)

        with (
            mock.patch.object(hybrid.KeyOffer, "sealing", agreed),
            mock.patch.object(hybrid.Sealing, "seal", sealed),
            mock.patch.object(hybrid.Sealing, "uncover", uncovered),
        ):
            yield

    def received(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        with self._lock:
            self._record_packet(peer, message, payload, upward=False)
            if not isinstance(message, wire.Result):
                return
            order, request, rows = self._waiting.pop(message.nonce)
            if payload is None:
                return
            if isinstance(request, wire.Execute) and rows is not None:
                header = msgspec.structs.asdict(request)
                kind = request.group, request.direction, request.arithmetic
                self._exchanges.append(Exchange(order, *kind, rows, payload.clone(), header))
            elif isinstance(request, wire.Effect):
                where = request.group, request.direction, request.rows, request.first_row, request.seed
                self._effects.append(EffectExchange(order, peer.name, *where, payload.clone()))

    def _record_packet(self, peer: Peer, message: wire.Message, payload: Tensor | None, *, upward: bool) -> None:
        width = 0 if payload is None or not len(payload) else payload.shape[1]
        body = message.encoding.size(message.rows, width) if isinstance(message, wire.Binding) else 0
        size = len(wire.encode(message, payload_bytes=body)) + body
        self._packets.append(Packet(time.monotonic() - self._started, f"{peer.host}:{peer.port}", upward, size))

    def views(self, neighbour: NeighbourView) -> Views:
        with self._lock:
            effects = sorted(self._effects, key=lambda e: e.order)
            names = sorted({e.helper for e in effects})
            executor = ExecutorView(tuple(sorted(self._exchanges, key=lambda e: e.order)))
            return Views(
                executor,
                tuple(HelperView(tuple(e for e in effects if e.helper == name)) for name in names),
                NetworkView(tuple(self._packets), executor.ring_bits),
                neighbour,
                tuple(self._links.values()),
            )
