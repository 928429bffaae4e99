"""Computes the traffic of a pass through a model from its manifest and the design alone.

A product of a layer group is one request and one answer, regardless of the number of linears in the group. A large
product is cut into pieces that are sent over several connections at the same time. The headers of frames are counted as
`wire` encodes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.network import wire
from tenant.connections.executor import LANES
from tenant.session.options import SessionOptions
from tenant.session.pieces import piece_rows


@dataclass(frozen=True, kw_only=True)
class PredictedTraffic:
    """Traffic between a tenant and its providers.

    Args:
        round_trips: requests to executors.
        turns: number of requests that follow one another; pieces of one product are sent at the same time.
        up, down: bytes of frames to and from executors.
        effects: bytes of effects from one helper; its requests are too few and too small to count.
    """

    round_trips: int = 0
    turns: int = 0
    up: int = 0
    down: int = 0
    effects: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(
            round_trips=self.round_trips + other.round_trips,
            turns=self.turns + other.turns,
            up=self.up + other.up,
            down=self.down + other.down,
            effects=self.effects + other.effects,
        )


def of_token(groups: Sequence[GroupEntry]) -> PredictedTraffic:
    """The traffic of a token: one row through all groups, forward."""
    return _of_pass(groups, FORWARD, 1)


def of_step(groups: Sequence[GroupEntry], *, rows: int) -> PredictedTraffic:
    """The traffic of a training step: rows through all groups and back.

    The first group has no backward product, because the embeddings below it are frozen.
    """
    forward = _of_pass(groups, FORWARD, rows)
    return forward + _of_pass(groups[1:], BACKWARD, rows, first=1)


def _of_pass(groups: Sequence[GroupEntry], direction: Direction, rows: int, *, first: int = 0) -> PredictedTraffic:
    products = (_of_product(group, i, direction, rows) for i, group in enumerate(groups, start=first))
    return sum(products, PredictedTraffic())


def _of_product(group: GroupEntry, index: int, direction: Direction, rows: int) -> PredictedTraffic:
    inputs, outputs = group.columns(direction)
    most = piece_rows(rows, group, piece_bytes=SessionOptions().piece_bytes)
    sizes = [min(most, rows - start) for start in range(0, rows, most)]
    up = down = 0
    for count in sizes:
        request = wire.Execute(
            nonce=bytes(wire.NONCE_BYTES), group=index, direction=direction, arithmetic="ring", rows=count
        )
        up += len(wire.encode(request)) + wire.RING32.size(count, inputs)
        down += len(wire.encode(wire.Result.answering(request))) + wire.RING32.size(count, outputs)
    return PredictedTraffic(
        round_trips=len(sizes),
        turns=-(-len(sizes) // LANES),
        up=up,
        down=down,
        effects=wire.RING32.size(rows, outputs),
    )
