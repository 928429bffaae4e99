"""Runnable jobs: by stage and tenant for fair shares, and by key for shared products.

Start-time fair queueing over two levels: between stages (inference has the larger weight, so it precedes fine-tuning
without starving it) and between the tenants of a stage. A tenant is charged with its rows' part of the time of a
product: a few rows alone cost as much as reading the weights, and less in a batch. The tenant that was charged least is
served next. An idle tenant accrues no credit. All connections of a tenant share one queue.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic

from provider.scheduler.jobs import J, Key, Stage

_IDLE_FLOWS = 64  # tenants without jobs that are kept before old ones are removed


class _Flow(Generic[J]):
    """The runnable jobs of one tenant in one stage, oldest first, and the tenant's charge."""

    def __init__(self) -> None:
        self.charged = 0.0
        self.jobs: OrderedDict[J, None] = OrderedDict()

    @property
    def first(self) -> J:
        return next(iter(self.jobs))


class _Level(Generic[J]):
    """The tenants of one stage."""

    def __init__(self, stage: Stage, weight: float) -> None:
        self.stage = stage
        self.weight = weight
        self.charged = 0.0
        self.now = 0.0  # virtual time: the charge of the flow that was served last, before it was served
        self.flows: dict[Hashable, _Flow[J]] = {}
        self._idle: dict[Hashable, _Flow[J]] = {}

    def add(self, job: J) -> None:
        flow = self.flows.get(job.tenant)
        if flow is None:
            flow = self._idle.pop(job.tenant, None) or _Flow()
            flow.charged = max(flow.charged, self.now)
            self.flows[job.tenant] = flow
        _enqueue(job, flow.jobs)

    def remove(self, job: J) -> None:
        flow = self.flows[job.tenant]
        del flow.jobs[job]
        if not flow.jobs:
            self._idle[job.tenant] = self.flows.pop(job.tenant)
            if len(self._idle) > _IDLE_FLOWS:
                self._idle = {tenant: flow for tenant, flow in self._idle.items() if flow.charged > self.now}


class RunnableJobs(Generic[J]):
    """The runnable jobs.

    Args:
        inference_weight: executor time of inference relative to fine-tuning when both have enough work.
    """

    def __init__(self, inference_weight: float) -> None:
        self._levels: dict[Stage, _Level[J]] = {
            "inference": _Level("inference", inference_weight),
            "fine_tuning": _Level("fine_tuning", 1.0),
        }
        self._now = 0.0  # virtual time between the stages
        self._by_key: dict[Key, OrderedDict[J, None]] = {}

    def __bool__(self) -> bool:
        """True if any job is runnable."""
        return bool(self._by_key)

    def add(self, job: J) -> None:
        """Add a job that has become runnable."""
        level = self._levels[job.stage]
        if not level.flows:
            level.charged = max(level.charged, self._now)
        level.add(job)
        _enqueue(job, self._by_key.setdefault(job.key, OrderedDict()))

    def remove(self, job: J) -> None:
        """Remove a job that is not runnable any more."""
        self._levels[job.stage].remove(job)
        same = self._by_key[job.key]
        del same[job]
        if not same:
            del self._by_key[job.key]

    def serve(self, leader: J) -> None:
        """Advance the virtual times: this job leads the next product."""
        level = self._levels[leader.stage]
        self._now = max(self._now, level.charged)
        level.now = max(level.now, self.charged(leader))

    def charge(self, job: J, seconds: float) -> None:
        """Charge a job's stage and tenant with executor time."""
        level = self._levels[job.stage]
        level.charged += seconds / level.weight
        level.flows[job.tenant].charged += seconds / job.weight

    def charged(self, job: J) -> float:
        """Charge of the job's tenant in the job's stage."""
        return self._levels[job.stage].flows[job.tenant].charged

    def least_charged(self, stage: Stage) -> float:
        """Charge of the stage's next tenant."""
        return min(flow.charged for flow in self._levels[stage].flows.values())

    def counts(self) -> dict[Stage, int]:
        """Number of jobs by stage."""
        return {stage: sum(len(flow.jobs) for flow in level.flows.values()) for stage, level in self._levels.items()}

    def keys(self) -> Iterator[Key]:
        return iter(self._by_key)

    def of_key(self, key: Key) -> list[J]:
        """The jobs with this key, which can share a product; oldest first."""
        return list(self._by_key[key])

    def in_turn(self) -> Iterator[tuple[Stage, list[J]]]:
        """Yield each stage that has jobs with the first job of each of its tenants. Stages and tenants are sorted by
        charge, tenants with equal charges by the arrival of their jobs.
        """
        for level in sorted((level for level in self._levels.values() if level.flows), key=lambda level: level.charged):
            flows = sorted(level.flows.values(), key=lambda flow: (flow.charged, flow.first.arrival))
            yield level.stage, [flow.first for flow in flows]

    def inference_is_due(self) -> bool:
        """True if an inference request that arrived now would precede fine-tuning."""
        inference, fine_tuning = self._levels["inference"], self._levels["fine_tuning"]
        return max(inference.charged, self._now) <= fine_tuning.charged


def _enqueue(job: J, jobs: OrderedDict[J, None]) -> None:
    """Append a job; put it in front if some of its rows were taken, so that jobs that have begun are finished first."""
    jobs[job] = None
    if job.taken:
        jobs.move_to_end(job, last=False)
