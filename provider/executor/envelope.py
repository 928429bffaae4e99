"""What the gateway says to its executor: a tenant's request, and what the scheduler must know about it.

A message is `[envelope, payload]` on one of `lines`. Every `Work` gets exactly one reply, `[head, payload]`,
ready for the wire: the product, or a `Failure` when it is cancelled, too late or broken. So whoever asked knows when
the executor holds none of its memory any more.
"""

from __future__ import annotations

import bisect
import math
from typing import get_args

import msgspec

from provider.scheduler.jobs import Stage
from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity

_KEYSTREAM_COST = 50  # multiply-adds that take as long as one keystream word
_STEP_S = 60.0  # a tenant that has sent no backward request for so long has stopped training


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
    """How the executor is; the answer's payload is an `ExecutorReport`."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Keystream has been made."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Answer what has arrived, and end."""


class Histogram(msgspec.Struct, kw_only=True):
    """How often a value was at most each of `bounds`; the last count is of those above."""

    bounds: tuple[float, ...]
    counts: list[int] = []
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """One more."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


_ROW_BOUNDS = tuple(float(1 << power) for power in range(0, 15, 2))
_REQUEST_BOUNDS = tuple(float(1 << power) for power in range(8))
_SECOND_BOUNDS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class ExecutorReport(msgspec.Struct, kw_only=True):
    """What an executor has done since it started.

    Args:
        first_group: the first layer group that is served.
        groups, groups_loaded: how many are served, and how many of those are in memory.
        resident: bytes of its process.
        waiting: requests by stage.
        late, cancelled, failed: requests that were answered without a product.
        uptime, idle, seconds: how long it has been there, has waited for something to do, and has multiplied; the rest
            of its time went into taking in, batching and answering.
        heat: rows by layer group, from the first one that is served.
        batch_rows, batch_requests: of each product.
        waits: seconds from a request's arrival to its first product, by stage.
    """

    first_group: int
    groups: int
    groups_loaded: int = 0
    resident: int = 0
    waiting: dict[Stage, int] = {}
    late: int = 0
    cancelled: int = 0
    failed: int = 0
    uptime: float = 0.0
    idle: float = 0.0
    seconds: float = 0.0
    heat: list[int] = []
    batch_rows: Histogram = msgspec.field(default_factory=lambda: Histogram(bounds=_ROW_BOUNDS))
    batch_requests: Histogram = msgspec.field(default_factory=lambda: Histogram(bounds=_REQUEST_BOUNDS))
    waits: dict[Stage, Histogram] = msgspec.field(
        default_factory=lambda: {stage: Histogram(bounds=_SECOND_BOUNDS) for stage in get_args(Stage)}
    )


Envelope = Work | Cancel | Ask | Wake | Stop

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Envelope).decode


class Stages:
    """Tells inference from fine-tuning, for each tenant and not for each connection: a tenant that sends its forward
    requests on one connection and its backward requests on another one is fine-tuning. Thread-safe.

    Args:
        few_rows: a forward request of more rows is never inference.
    """

    def __init__(self, few_rows: int) -> None:
        self._few_rows = few_rows
        self._last_backward: dict[TenantIdentity, float] = {}

    def of(self, tenant: TenantIdentity, request: wire.Execute | wire.Effect, now: float) -> Stage:
        """The stage of a request that arrives `now`, in seconds of a monotonic clock. A forward request of few rows is
        inference, unless its tenant has sent a backward request within the last minute.
        """
        if request.direction != FORWARD:
            self._last_backward[tenant] = now
        trains = now - self._last_backward.get(tenant, -math.inf) <= _STEP_S
        return "fine_tuning" if trains or request.rows > self._few_rows else "inference"


def row_work(request: wire.Execute | wire.Effect, entry: GroupEntry) -> int:
    """Multiply-adds of one row's product."""
    inputs, outputs = entry.columns(request.direction)
    return inputs * outputs


def row_cost(request: wire.Execute | wire.Effect, entry: GroupEntry) -> int:
    """What one row takes, in multiply-adds: an effect's keystream included."""
    inputs, _ = entry.columns(request.direction)
    return row_work(request, entry) + (_KEYSTREAM_COST * inputs if isinstance(request, wire.Effect) else 0)
