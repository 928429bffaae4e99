"""Predicts the traffic of a pass through a model from the manifest.

A product of a layer group is one request and one answer, regardless of the number of linears in the group. A large
product is cut into parts that are sent over several connections at the same time. The headers of frames are counted as
`wire` encodes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction
from symbiosis_priv.checkpoints.layers import RoundTrips
from symbiosis_priv.checkpoints.manifest import GroupEntry, while_decoding
from symbiosis_priv.limits import DEFAULT_RING_BITS, RingBits
from symbiosis_priv.network import wire
from tenant.connections.executor_client import PARALLEL_CHANNELS
from tenant.options import MOST_ROWS, SessionOptions
from tenant.session.part_queue import part_rows


@dataclass(frozen=True, kw_only=True)
class PredictedTraffic:
    """Traffic between a tenant and its providers. `turns`: number of requests that follow one another; parts of one
    product are sent at the same time. `up`, `down`: bytes of frames to and from executors. `effects`: bytes of effects
    from one helper. Requests to helpers are few and small, and are not counted."""

    round_trips: int = 0
    turns: int = 0
    up: int = 0
    down: int = 0
    effects: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Transport:
    """How matrices are sent. `round_trips`: 2 if a pass of few rows uses composed groups. Such a group's product is
    under way together with that of the group after it, and the two are one turn."""

    ring_bits: RingBits = DEFAULT_RING_BITS
    round_trips: RoundTrips = 4


DIRECT = Transport()


def of_token(groups: Sequence[GroupEntry], transport: Transport = DIRECT) -> PredictedTraffic:
    """Predict the traffic of a token: one row through all groups, forward."""
    return of_pass(groups, FORWARD, 1, transport)


def of_step(groups: Sequence[GroupEntry], rows: int, transport: Transport = DIRECT) -> PredictedTraffic:
    """Predict the traffic of a training step: rows through all groups, forward and backward."""
    return of_pass(groups, FORWARD, rows, transport) + of_pass(groups, BACKWARD, rows, transport)


def of_pass(
    groups: Sequence[GroupEntry], direction: Direction, rows: int, transport: Transport = DIRECT
) -> PredictedTraffic:
    """Predict the traffic of rows through all groups in one direction, without gradients if it is forward. The first
    group has no backward product, because the embeddings below it are frozen."""
    two = transport.round_trips == 2 and direction == FORWARD and rows <= MOST_ROWS
    used = while_decoding(groups) if two else [group for group in groups if group.composed is None]
    products = [
        replace(product, turns=0) if group.composed is not None else product
        for i, group in enumerate(groups)
        if group in used
        for product in [_of_product(group, i, direction, rows, transport)]
    ]
    return sum(products[direction == BACKWARD :], PredictedTraffic())


def _of_product(
    group: GroupEntry, index: int, direction: Direction, rows: int, transport: Transport
) -> PredictedTraffic:
    inputs, outputs = group.columns(direction)
    most = part_rows(rows, wire.RING32.size(rows, inputs + outputs), part_bytes=SessionOptions().part_bytes)
    sizes = [min(most, rows - start) for start in range(0, rows, most)]
    up = down = 0
    for count in sizes:
        request = wire.Execute(
            nonce=bytes(wire.NONCE_BYTES),
            group=index,
            direction=direction,
            arithmetic="ring",
            rows=count,
            ring_bits=transport.ring_bits,
        )
        result = wire.Result.answering(request)
        up += len(wire.encode(request)) + request.encoding.size(count, inputs)
        down += len(wire.encode(result)) + request.encoding.size(count, outputs)
    return PredictedTraffic(
        round_trips=len(sizes),
        turns=-(-len(sizes) // PARALLEL_CHANNELS),
        up=up,
        down=down,
        effects=wire.encoding_of("ring", transport.ring_bits).size(rows, outputs),
    )
