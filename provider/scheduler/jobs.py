"""What a scheduler holds and hands out: one request's rows, and pieces of them."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.network import wire

Stage = Literal["inference", "fine_tuning"]
Key = tuple[int, Direction, wire.Arithmetic]


@dataclass(kw_only=True, eq=False)
class Job:
    """One request's rows.

    Args:
        tenant: whose turn it takes.
        stage: of the tenant's work.
        key: layer group, direction and arithmetic: what it can share a product with.
        rows: at least 1. The gateway answers requests of zero rows: they have no work to be charged with.
        row_work: multiply-adds of one row's product.
        row_cost: what one row is charged with; more than `row_work` if it takes other work too.
        arrival: when it came.
        deadline: when it is worth nothing any more.
        weight: of its tenant.
        ready: rows that can be multiplied now; a helper's come as their keystream is made.
        taken: rows that `Scheduler.take` has handed out.
    """

    tenant: Hashable
    stage: Stage
    key: Key
    rows: int
    row_work: int
    row_cost: int
    arrival: float
    deadline: float
    weight: float = 1.0
    ready: int = 0
    taken: int = 0
    left: bool = False
    """Dropped, expired or taken to the last row: the scheduler does not know it any more."""
    offered: float = math.inf
    """When it could have gone first: how long it waits for others counts from there."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError("a job has at least one row: answer a request of zero rows without the scheduler")

    @property
    def runnable(self) -> bool:
        """Whether `Scheduler.take` could hand it out."""
        return self.taken < self.ready


J = TypeVar("J", bound=Job)


class Piece(NamedTuple, Generic[J]):  # is made in a third of a frozen dataclass's time
    """Rows `start .. stop` of a job."""

    job: J
    start: int
    stop: int

    @classmethod
    def next_of(cls, job: J, most: int) -> Piece[J]:
        """The job's next rows, of those that are ready."""
        return cls(job, job.taken, min(job.ready, job.taken + most))

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.start

    @property
    def last(self) -> bool:
        """Whether the job ends with it."""
        return self.stop == self.job.rows
