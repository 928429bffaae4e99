"""Runnable jobs: by stage and tenant, who have fair shares; by key, who can share a product.

Start-time fair queueing over two levels: between stages (inference weighs more, so it goes ahead of fine-tuning and
cannot starve it) and between the tenants of a stage. Whoever's rows are taken is charged their part of the time that
the product takes: a few rows alone cost what reading the weights costs, and less in company. Who has been charged least
goes first; who was away has saved nothing up. A tenant is one queue, however many connections it has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic

from provider.scheduler.jobs import J, Key, Stage

_IDLE_FLOWS = 64  # tenants without jobs that are remembered before a sweep


class _Flow(Generic[J]):
    """A tenant's runnable jobs of one stage, oldest first, and what it has been charged."""

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
        self.now = 0.0  # the virtual time: what the flow that was served last had been charged before
        self.flows: dict[Hashable, _Flow[J]] = {}
        self._idle: dict[Hashable, _Flow[J]] = {}

    def add(self, job: J) -> None:
        flow = self.flows.get(job.tenant)
        if flow is None:
            flow = self._idle.pop(job.tenant, None) or _Flow()
            flow.charged = max(flow.charged, self.now)
            self.flows[job.tenant] = flow
        _line_up(job, flow.jobs)

    def remove(self, job: J) -> None:
        flow = self.flows[job.tenant]
        del flow.jobs[job]
        if not flow.jobs:
            self._idle[job.tenant] = self.flows.pop(job.tenant)
            if len(self._idle) > _IDLE_FLOWS:
                self._idle = {tenant: flow for tenant, flow in self._idle.items() if flow.charged > self.now}


class Waiting(Generic[J]):
    """The jobs that could be taken.

    Args:
        inference_weight: how much more of the executor inference gets than fine-tuning when both want all of it.
    """

    def __init__(self, inference_weight: float) -> None:
        self._levels: dict[Stage, _Level[J]] = {
            "inference": _Level("inference", inference_weight),
            "fine_tuning": _Level("fine_tuning", 1.0),
        }
        self._now = 0.0  # virtual time between the stages
        self._by_key: dict[Key, OrderedDict[J, None]] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._by_key)

    def add(self, job: J) -> None:
        """It can be taken."""
        level = self._levels[job.stage]
        if not level.flows:
            level.charged = max(level.charged, self._now)
        level.add(job)
        _line_up(job, self._by_key.setdefault(job.key, OrderedDict()))

    def remove(self, job: J) -> None:
        """It cannot be taken any more."""
        self._levels[job.stage].remove(job)
        same = self._by_key[job.key]
        del same[job]
        if not same:
            del self._by_key[job.key]

    def serve(self, leader: J) -> None:
        """It is this job's turn."""
        level = self._levels[leader.stage]
        self._now = max(self._now, level.charged)
        level.now = max(level.now, self.charged(leader))

    def charge(self, job: J, seconds: float) -> None:
        """So much time of the executor goes to it."""
        level = self._levels[job.stage]
        level.charged += seconds / level.weight
        level.flows[job.tenant].charged += seconds / job.weight

    def charged(self, job: J) -> float:
        """What its tenant has been charged in its stage."""
        return self._levels[job.stage].flows[job.tenant].charged

    def least_charged(self, stage: Stage) -> float:
        """What the tenant of this stage has been charged whose turn is next."""
        return min(flow.charged for flow in self._levels[stage].flows.values())

    def counts(self) -> dict[Stage, int]:
        """Jobs by stage."""
        return {stage: sum(len(flow.jobs) for flow in level.flows.values()) for stage, level in self._levels.items()}

    def keys(self) -> Iterator[Key]:
        """What there are jobs for."""
        return iter(self._by_key)

    def of_key(self, key: Key) -> list[J]:
        """The jobs that can share a product, oldest first."""
        return list(self._by_key[key])

    def in_turn(self) -> Iterator[tuple[Stage, list[J]]]:
        """The stages with something to do and the first job of each of their tenants, least charged first; of tenants
        that have been charged the same, the one that waits longest.
        """
        for level in sorted((level for level in self._levels.values() if level.flows), key=lambda level: level.charged):
            flows = sorted(level.flows.values(), key=lambda flow: (flow.charged, flow.first.arrival))
            yield level.stage, [flow.first for flow in flows]

    def inference_is_due(self) -> bool:
        """Whether it would go ahead of fine-tuning if it asked for something."""
        inference, fine_tuning = self._levels["inference"], self._levels["fine_tuning"]
        return max(inference.charged, self._now) <= fine_tuning.charged


def _line_up(job: J, line: OrderedDict[J, None]) -> None:
    """At the end, or in front if some of its rows have been taken: what has begun is finished first."""
    line[job] = None
    if job.taken:
        line.move_to_end(job, last=False)
