"""Simulates a provider and its tenants with a simulated clock, to compare the throughput and latency of policies.

A product takes as long as on a model of width 4096 on one core, with compiled kernels that prefetch: the time to read
the weights or the time of all rows, whichever is longer. Tenants go through a model's layer groups forward, and
training tenants back again. Between two requests each tenant computes, on one core that all tenants share, and may be
delayed. `symbiosis-priv bench provider` measures real providers.
"""

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from provider.config.schema import SchedulerConfig
from provider.scheduler.jobs import Job, Key
from provider.scheduler.scheduler import Scheduler
from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction

HIDDEN = 4096
GROUPS = ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN), (2 * HIDDEN, HIDDEN))
READING = 50e-12  # seconds to read a weight
ROW = 8.6e-12  # seconds per weight and row
PRODUCT, REQUEST = 0.6e-3, 0.25e-3  # further seconds of the executor per product
TENANT, VALUE = 0.6e-3, 4.5e-9  # seconds of a tenant per request, and per number in it
NETWORK = 0.3e-3
HOLD_UP = 6e-3
FEW_ROWS = 16
WARM_UP = 2.0


@dataclass
class Tenant:
    """A tenant.

    Args:
        name: name of the tenant.
        rows: rows of each request.
        trains: True if it sends backward requests, too.
        layers: layers of the model, four layer groups each.
        turns: seconds of each token of a batch, or of each step, after the first `warm_up` seconds.
    """

    name: str
    rows: int
    trains: bool = False
    layers: int = 1
    turns: list[float] = field(default_factory=list)
    warm_up: float = WARM_UP
    _at: int = 0
    _begun: float = 0.0

    def __post_init__(self) -> None:
        groups = self.layers * len(GROUPS)
        self._path: list[tuple[int, Direction]] = [(group, FORWARD) for group in range(groups)]
        if self.trains:
            self._path += [(group, BACKWARD) for group in reversed(range(groups))]

    def ask(self, now: float) -> Job:
        """The next request."""
        group, direction = self._path[self._at]
        if self._at == 0:
            self._begun = now
        inputs, outputs = GROUPS[group % len(GROUPS)]
        return Job(
            tenant=self.name,
            stage="fine_tuning" if self.trains or self.rows > FEW_ROWS else "inference",
            key=Key(group, direction, "ring"),
            rows=self.rows,
            row_work=inputs * outputs,
            row_cost=inputs * outputs,
            arrival=now,
            deadline=1e9,
            ready=self.rows,
        )

    def hear(self, now: float) -> float:
        """Receive an answer. Returns the seconds that the tenant computes before its next request."""
        group, _ = self._path[self._at]
        self._at = (self._at + 1) % len(self._path)
        if self._at == 0 and now > self.warm_up:
            self.turns.append(now - self._begun)
        return TENANT + VALUE * self.rows * sum(GROUPS[group % len(GROUPS)])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of the generating tenants.

    Args:
        tokens_per_s: tokens per second of all tenants.
        latency: mean seconds of a token of a batch.
        idle: share of time in which the executor was idle.
        batch_requests: mean number of requests of a product.
    """

    tokens_per_s: float
    latency: float
    idle: float
    batch_requests: float


def rehearse(
    config: SchedulerConfig, tenants: Sequence[Tenant], *, seconds: float = 12.0, seed: int = 0, held_up: float = 0.0
) -> Outcome:
    """Let the tenants send requests; their `turns` hold their times afterwards.

    Args:
        held_up: share of requests before which a tenant is delayed, for `HOLD_UP` on average.
    """
    chance, order = random.Random(seed), itertools.count()
    subject: Scheduler[Job] = Scheduler(config)
    by_name = {tenant.name: tenant for tenant in tenants}
    coming = [(chance.uniform(0, 0.01), next(order), tenant) for tenant in tenants]
    heapq.heapify(coming)
    now = idle = core = 0.0  # the last entry is the time at which the tenants' core is free
    products = requests = 0
    while now < WARM_UP + seconds:
        while coming and coming[0][0] <= now:
            at, _, tenant = heapq.heappop(coming)
            subject.put(tenant.ask(at))
        pieces = subject.take(now)
        if not pieces:
            deadline = subject.next_deadline(now)
            then = min([coming[0][0]] if coming else [], default=1e9)
            then = min(then, 1e9 if deadline is None else deadline)
            assert then > now
            idle, now = idle + then - now, then
            continue
        rows = sum(piece.rows for piece in pieces)
        product = pieces[0].job.row_work * max(READING, rows * ROW)
        took = PRODUCT + len(pieces) * REQUEST + product
        now += took
        products, requests = products + 1, requests + len(pieces)
        subject.done(pieces, now=now, seconds=product)
        for piece in pieces:
            if piece.last:
                tenant = by_name[str(piece.job.tenant)]
                busy = tenant.hear(now) * chance.uniform(0.7, 1.4)
                core = max(core, now) + min(busy, 2e-3)  # a long computation is interrupted by the other tenants'
                late = chance.expovariate(1 / HOLD_UP) if chance.random() < held_up else 0.0
                heapq.heappush(coming, (core + max(0.0, busy - 2e-3) + NETWORK + late, next(order), tenant))
    generating = [(tenant.rows, turn) for tenant in tenants if not tenant.trains for turn in tenant.turns]
    return Outcome(
        tokens_per_s=sum(rows for rows, _ in generating) / seconds,
        latency=sum(turn for _, turn in generating) / max(1, len(generating)),
        idle=idle / now,
        batch_requests=requests / max(1, products),
    )
