"""What the gateway says to its executor: a tenant's request, and what the scheduler must know about it.

A message is `[envelope, payload]` over a private ZeroMQ socket. Every `Work` gets exactly one reply, `[head, payload]`,
ready for the wire: the product, or a `Failure` when it is cancelled, too late or broken. So whoever asked knows when
the executor holds none of its memory any more.
"""

from __future__ import annotations

import msgspec

from provider.scheduler import Stage
from symbiosis_priv import wire
from symbiosis_priv.manifest import GroupEntry
from symbiosis_priv.ring import FORWARD
from symbiosis_priv.tls import TenantIdentity

_KEYSTREAM_COST = 50  # multiply-adds that take as long as one keystream word


class Work(msgspec.Struct, frozen=True, kw_only=True, tag="work"):
    """A product to compute.

    Args:
        tenant: who asked.
        stage: of its work.
        weight: its share beside others.
        arrival: when its last byte was here, by `time.monotonic()`, which the processes of one machine share.
        deadline: when nobody waits for it any more, by the same clock.
        request: checked against model, shapes and limits.
    """

    tenant: TenantIdentity
    stage: Stage
    weight: float
    arrival: float
    deadline: float
    request: wire.Execute | wire.Effect


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The sender's tenant has left: its work is worth nothing, and should be answered now."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """How the executor is."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Keystream has been made."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Answer what has arrived, and end."""


Envelope = Work | Cancel | Ask | Wake | Stop

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Envelope).decode


def stage_of(request: wire.Execute | wire.Effect, *, few_rows: int) -> Stage:
    """Few rows forward are somebody waiting for a token; the rest is training, or a prompt."""
    return "inference" if request.direction == FORWARD and request.rows <= few_rows else "fine_tuning"


def row_work(request: wire.Execute | wire.Effect, entry: GroupEntry) -> int:
    """Multiply-adds of one row's product."""
    inputs, outputs = entry.columns(request.direction)
    return inputs * outputs


def row_cost(request: wire.Execute | wire.Effect, entry: GroupEntry) -> int:
    """What one row takes, in multiply-adds: an effect's keystream included."""
    inputs, _ = entry.columns(request.direction)
    return row_work(request, entry) + (_KEYSTREAM_COST * inputs if isinstance(request, wire.Effect) else 0)
