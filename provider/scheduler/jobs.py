"""The data of the scheduler: a job has the rows of one request, and a piece is a range of these rows."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Self, TypeVar

from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.network import wire

Stage = Literal["inference", "fine_tuning"]


class Key(NamedTuple):
    """The product that a job's rows need. Jobs with the same key can share a product.

    Args:
        by_expert: True if each row is multiplied by the matrix of one expert, and not by the whole stack.
    """

    group: int
    direction: Direction
    arithmetic: wire.Arithmetic
    by_expert: bool = False


@dataclass(kw_only=True, eq=False)
class Job:
    """The rows of one request.

    Args:
        tenant: the tenant that is charged.
        key: the product that the rows need.
        rows: at least 1. The gateway answers requests of zero rows: they have no work that could be charged.
        row_work: multiply-adds of one row's product.
        row_cost: multiply-adds that one row is charged with; more than `row_work` if a row needs other work too.
        arrival, deadline: in seconds of the scheduler's clock.
        matrices: number of matrices that the rows need: of the experts with rows if `key.by_expert`, else 1.
        weight: the tenant's share of the executor, relative to other tenants.
        ready: number of rows that can be multiplied now. An effect's rows become ready as their keystream is made.
        taken: number of rows that `Scheduler.take` has handed out.
    """

    tenant: Hashable
    stage: Stage
    key: Key
    rows: int
    row_work: int
    row_cost: int
    arrival: float
    deadline: float
    matrices: int = 1
    weight: float = 1.0
    ready: int = 0
    taken: int = 0
    left: bool = False
    """True once the scheduler has forgotten the job: it was dropped, has expired, or all its rows were taken."""
    offered: float = math.inf
    """Time at which the job was first able to lead a product. The wait to be batched counts from there."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError("a job has at least one row: answer a request of zero rows without the scheduler")

    @property
    def runnable(self) -> bool:
        """True if the job has rows that can be taken now."""
        return self.taken < self.ready


J = TypeVar("J", bound=Job)


class Piece(NamedTuple, Generic[J]):  # creating a frozen dataclass takes three times as long
    """Rows `start .. stop` of a job."""

    job: J
    start: int
    stop: int

    @classmethod
    def next_of(cls, job: J, most: int) -> Self:
        """The next ready rows of the job, `most` at most."""
        return cls(job, job.taken, min(job.ready, job.taken + most))

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def last(self) -> bool:
        """True if this is the last piece of its job."""
        return self.stop == self.job.rows
