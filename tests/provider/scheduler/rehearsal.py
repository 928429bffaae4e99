"""Simulates an executor and its tenants with a simulated clock, to compare the throughput and latency of policies.

A product takes as long as on a model of width 4096 on one core, with compiled kernels that prefetch: the time to read
the weights or the time of all rows, whichever is longer. Tenants go through a model's layer groups forward, and
training tenants back again. In `rehearse`, tenants compute between two requests on one core that all of them share, and
may be delayed. `symbiosis-priv bench provider` measures real providers.
"""

import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from provider.scheduler.jobs import Job, Key
from provider.scheduler.scheduler import Scheduler
from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction

HIDDEN = 4096
GROUPS = ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN), (2 * HIDDEN, HIDDEN))
TENANT, VALUE = 0.6e-3, 4.5e-9  # seconds of a tenant per request, and per number in it
NETWORK = 0.3e-3
HOLD_UP = 6e-3
FEW_ROWS = 16
WARM_UP = 2.0


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What things cost, in seconds: to read a weight, a multiply-add, a product, and a request of a product."""

    weight_s: float
    row_s: float
    product_s: float
    request_s: float = 0.25e-3


ONE_CORE = Hardware(weight_s=50e-12, row_s=8.6e-12, product_s=0.6e-3)
"""Measured by `make gpu` and `bench provider`: two bytes a weight at 40 GB/s, 116 GMAC/s."""


@dataclass
class Executor:
    """An executor with its scheduler; `free_at` is when its product ends. The figures begin after the warm-up."""

    hardware: Hardware
    scheduler: Scheduler[Job]
    free_at: float = 0.0
    wakes_at: float = float("inf")
    busy_s: float = 0.0
    products: int = 0
    requests: int = 0


@dataclass
class Tenant:
    """A tenant, which sends requests of `rows` rows; backward, too, if it `trains`."""

    name: str
    rows: int
    trains: bool = False
    layers: int = 1  # of four layer groups each
    turns: list[float] = field(default_factory=list)  # seconds of each token of a batch, or step, after the warm-up
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
        if self._at == 0 and now > WARM_UP:
            self.turns.append(now - self._begun)
        return TENANT + VALUE * self.rows * sum(GROUPS[group % len(GROUPS)])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of the generating tenants.

    Args:
        tokens_per_s: tokens per second of all tenants.
        latency: seconds of a token of a batch: the geometric mean of the tenants' means. (In a mean over all tokens,
            the slowest tenants count least: it grows when they become faster.)
        idle: share of time in which the executor was idle.
        batch_requests: mean number of requests of a product.
    """

    tokens_per_s: float
    latency: float
    idle: float
    batch_requests: float


def play(
    executor: Executor,
    arrivals: Sequence[tuple[float, Tenant]],
    *,
    think: Callable[[Tenant, float], float],
    seconds: float,
) -> None:
    """Let the tenants send requests; their `turns` hold their times afterwards.

    Args:
        arrivals: when each tenant sends its first request.
        think: told a tenant and the time of its answer, returns the time of its next request.
    """
    order = itertools.count()
    by_name = {tenant.name: tenant for _, tenant in arrivals}
    events: list[Any] = [(time, next(order), tenant) for time, tenant in arrivals]
    heapq.heapify(events)

    def work(now: float) -> None:
        pieces = executor.scheduler.take(now)
        if not pieces:
            deadline = executor.scheduler.next_deadline(now)
            if deadline is not None and deadline < executor.wakes_at:
                executor.wakes_at = deadline
                heapq.heappush(events, (deadline, next(order), executor))
            return
        rows, hardware = sum(piece.rows for piece in pieces), executor.hardware
        product = pieces[0].job.row_work * max(hardware.weight_s, rows * hardware.row_s)
        took = hardware.product_s + len(pieces) * hardware.request_s + product
        executor.free_at = now + took
        executor.scheduler.done(pieces, now=executor.free_at, seconds=product)
        if now > WARM_UP:
            executor.busy_s += took
            executor.products += 1
            executor.requests += len(pieces)
        heapq.heappush(events, (executor.free_at, next(order), executor))
        for piece in pieces:
            if piece.last:
                tenant = by_name[str(piece.job.tenant)]
                heapq.heappush(events, (think(tenant, executor.free_at), next(order), tenant))

    while events and events[0][0] < seconds:
        now, _, who = heapq.heappop(events)
        if who is executor:
            executor.wakes_at = float("inf")
        else:
            executor.scheduler.put(who.ask(now))
        if executor.free_at <= now:
            work(now)


def rehearse(
    scheduler: Scheduler[Job],
    tenants: Sequence[Tenant],
    *,
    seconds: float,
    held_up: float = 0.0,
) -> Outcome:
    """Let the tenants of one executor send requests. `held_up`: share of requests before
    which a tenant is delayed, for `HOLD_UP` on average."""
    chance, executor = random.Random(0), Executor(ONE_CORE, scheduler)
    core = 0.0  # the time at which the tenants' core is free

    def think(tenant: Tenant, now: float) -> float:
        nonlocal core
        busy = tenant.hear(now) * chance.uniform(0.7, 1.4)
        core = max(core, now) + min(busy, 2e-3)  # a long computation is interrupted by the other tenants'
        late = chance.expovariate(1 / HOLD_UP) if chance.random() < held_up else 0.0
        return core + max(0.0, busy - 2e-3) + NETWORK + late

    arrivals = [(chance.uniform(0, 0.01), tenant) for tenant in tenants]
    play(executor, arrivals, think=think, seconds=WARM_UP + seconds)
    generating = [(tenant.rows, turn) for tenant in tenants if not tenant.trains for turn in tenant.turns]
    return Outcome(
        tokens_per_s=sum(rows for rows, _ in generating) / seconds,
        latency=statistics.geometric_mean(statistics.mean(tenant.turns) for tenant in tenants if not tenant.trains),
        idle=1 - executor.busy_s / seconds,
        batch_requests=executor.requests / max(1, executor.products),
    )
