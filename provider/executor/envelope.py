"""Messages from the gateway to its executor: tenants' requests, with the facts that the scheduler needs.

A message is `[envelope, payload]`, sent over `queues`. Every `ProductRequest` gets exactly one answer: the
product, or a `Failure` if the request was cancelled, late or failed. When the answer arrives, the executor holds no
memory of the request any more.
"""

import bisect
import math
from typing import get_args

import msgspec

from provider.scheduler.jobs import Stage
from symbiosis_priv.arithmetic.ring import FORWARD, Widths
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity

_KEYSTREAM_COST = 50  # multiply-adds that take as long as one keystream word
_STEP_S = 60.0  # a tenant that has sent no backward request for this time has stopped training


class ProductRequest(msgspec.Struct, frozen=True, kw_only=True, tag="work"):
    """A tenant's request for a product.

    Args:
        weight: the tenant's weight in fair sharing.
        arrival: time at which the last byte arrived, by `time.monotonic()`, which all processes of a machine share.
        deadline: the time after which the gateway ignores the answer, by the same clock.
        request: the request, checked against model, shapes and limits.
    """

    tenant: TenantIdentity
    stage: Stage
    weight: float
    arrival: float
    deadline: float
    request: wire.Execute | wire.Effect


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The tenant has left: the executor should answer the sender's request now, without a product."""


class ReportRequest(msgspec.Struct, frozen=True, tag="ask"):
    """Ask for an `ExecutorReport`, which is the answer's payload."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Wakes the executor's thread: keystream rows are ready, or the thread would sleep for too long."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Ask the executor to answer all requests that have arrived, and to end."""


class Histogram(msgspec.Struct, kw_only=True):
    """Counts of observed values: one count per upper bound in `bounds`, and a last one for values above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = []
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


_ROW_BOUNDS = tuple(float(1 << power) for power in range(0, 15, 2))
_REQUEST_BOUNDS = tuple(float(1 << power) for power in range(8))
_SECOND_BOUNDS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class ExecutorReport(msgspec.Struct, kw_only=True):
    """Statistics of an executor since its start.

    Args:
        first_group: index of the first layer group that is served.
        groups, groups_loaded: number of layer groups that are served, and number of those in memory.
        resident: resident memory of the executor's process, in bytes.
        late, cancelled, failed: number of requests that were answered without a product.
        uptime, idle, seconds: seconds since the start, seconds without work, and seconds in products. The rest of the
            uptime was spent on receiving, batching and answering.
        rows_by_group: rows by layer group, from `first_group` on.
        batch_rows, batch_requests: rows and requests per product.
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
    rows_by_group: list[int] = []
    batch_rows: Histogram = msgspec.field(default_factory=lambda: Histogram(bounds=_ROW_BOUNDS))
    batch_requests: Histogram = msgspec.field(default_factory=lambda: Histogram(bounds=_REQUEST_BOUNDS))
    waits: dict[Stage, Histogram] = msgspec.field(
        default_factory=lambda: {stage: Histogram(bounds=_SECOND_BOUNDS) for stage in get_args(Stage)}
    )


Envelope = ProductRequest | Cancel | ReportRequest | Wake | Stop

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Envelope).decode


class Stages:
    """Tells inference from fine-tuning. Thread-safe.

    The stage is found per tenant and not per connection: a tenant that sends forward requests on one connection and
    backward requests on another is fine-tuning.

    Args:
        few_rows: a forward request with more rows is never inference.
    """

    def __init__(self, few_rows: int) -> None:
        self._few_rows = few_rows
        self._last_backward: dict[TenantIdentity, float] = {}

    def of(self, tenant: TenantIdentity, request: wire.Execute | wire.Effect, now: float) -> Stage:
        """The stage of a request. A forward request of few rows is inference, unless its tenant has sent a backward
        request within the last minute.

        Args:
            now: arrival of the request, in seconds of a monotonic clock.
        """
        if request.direction != FORWARD:
            self._last_backward[tenant] = now
        trains = now - self._last_backward.get(tenant, -math.inf) <= _STEP_S
        return "fine_tuning" if trains or request.rows > self._few_rows else "inference"


def row_load(request: type[wire.Binding], columns: Widths, *, relayed: bool) -> tuple[int, int]:
    """The multiply-adds of one row's product, and the multiply-adds that the row costs: an effect's row includes its
    keystream, and a relayed effect's row also the second keystream, which has the product's columns.

    Args:
        columns: columns of the request's rows and of the product.
        relayed: True if the request asks for a relay.
    """
    inputs, outputs = columns
    work = inputs * outputs
    words = 0 if request is not wire.Effect else inputs + outputs if relayed else inputs
    return work, work + _KEYSTREAM_COST * words
