"""The data of the scheduler: the rows of one request (`Job`), a range of them (`Piece`), the expected duration of their
products (`Pace`), and the runnable jobs in order of fair shares (`RunnableJobs`)."""

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Self, TypeVar

from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.network import wire

Stage = Literal["inference", "fine_tuning"]


class Key(NamedTuple):
    """The product that a job's rows need. Jobs with the same key can share a product. With `by_expert`, each row is
    multiplied by the matrix of one expert, and not by the whole stack."""

    group: int
    direction: Direction
    arithmetic: wire.Arithmetic
    by_expert: bool = False
    narrow: bool = False
    """True if rows and products are three bytes per entry (`ProductRequest.narrow`)."""


@dataclass(kw_only=True, eq=False)
class Job:
    """The rows of one request: at least one. The gateway answers requests of zero rows: they have no work that could be
    charged."""

    tenant: Hashable
    stage: Stage
    key: Key
    rows: int
    row_work: int  # multiply-adds of one row's product
    row_cost: int  # multiply-adds that one row is charged with; more than `row_work` if a row needs other work too
    arrival: float  # in seconds of the scheduler's clock
    deadline: float
    matrices: int = 1  # that the rows need: of the experts with rows if `key.by_expert`
    weight: float = 1.0  # the tenant's share of the executor, relative to other tenants
    ready: int = 0  # rows that can be multiplied now; an effect's rows become ready as their keystream is made
    taken: int = 0  # rows that `Scheduler.take` has handed out
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


_Kind = tuple[Direction, wire.Arithmetic, bool, bool]  # a key without its layer group
_FIRST_GUESS = 2e9  # multiply-adds a second, before the first product was timed
ARITHMETIC_ROWS = 8  # a product of fewer rows shows the time to read the weights, not the time of a row


class Pace:
    """A model of the duration of products. A product takes as long as reading its weights (those of every expert that
    has rows) or as the arithmetic of its rows, whichever is longer. Products of few rows show the time of reading,
    products of many rows the time of the arithmetic.

    Each layer group is measured separately: a product of a narrow group takes far longer per multiply-add than one of a
    wide group. With one estimate for all groups, a tenant that asks for the narrowest group makes the products of other
    tenants look slow, and its own products free. A group that was not measured is as fast as the fastest known one."""

    def __init__(self, slice_s: float) -> None:
        self._slice_s = slice_s
        self._reads: dict[Key, float] = {}  # seconds per weight
        self._rates: dict[Key, float] = {}  # multiply-adds a second
        self._least_reads: dict[_Kind, float] = {}
        self._best_rates: dict[_Kind, float] = {}

    def rows(self, job: Job, *, slices: int = 1) -> int:
        """Number of rows with the job's key that take about one slice, or several; at least 8, so that the model keeps
        learning."""
        seconds = slices * self._slice_s
        rows = self.rows_in(job, seconds)
        if reading := _matrices_of_row(job) * self._read(job.key) * job.row_work:
            rows = min(rows, int(seconds / reading))
        return max(ARITHMETIC_ROWS, rows)

    def rows_in(self, job: Job, seconds: float) -> int:
        """Number of rows with the job's key whose arithmetic takes `seconds`."""
        return int(seconds * self._rate(job.key) / max(1, job.row_work))

    def seconds(self, job: Job, rows: int) -> float:
        """Expected duration of a product of `rows` rows with the job's key."""
        matrices = max(1.0, rows * _matrices_of_row(job))
        return max(matrices * self._read(job.key), rows / self._rate(job.key)) * job.row_work

    def record(self, key: Key, *, rows: int, work: int, seconds: float, matrices: int = 1) -> None:
        """Learn that a product of `work` multiply-adds with `matrices` matrices took `seconds`. One outlier changes an
        estimate by at most 2x."""
        if not work:
            return
        kind, per_weight, rate = key[1:], seconds * rows / work / matrices, work / max(seconds, 1e-9)
        read, before = self._read(key), self._rate(key)
        if few := rows < ARITHMETIC_ROWS * matrices:
            self._reads[key] = read = _nearer(read or per_weight, per_weight)
            self._least_reads[kind] = min(self._least_reads.get(kind, read), read)
        # with few rows, or faster than reading: reading hid the arithmetic
        self._rates[key] = rate = max(before, rate) if few or per_weight < read else _nearer(before, rate)
        self._best_rates[kind] = max(self._best_rates.get(kind, _FIRST_GUESS), rate)

    def _read(self, key: Key) -> float:
        return self._reads.get(key, self._least_reads.get(key[1:], 0.0))

    def _rate(self, key: Key) -> float:
        return self._rates.get(key, self._best_rates.get(key[1:], _FIRST_GUESS))


def _matrices_of_row(job: Job) -> float:
    """Matrices that each further row adds to a product of the job's rows."""
    return job.matrices / job.rows if job.key.by_expert else 0.0


def _nearer(old: float, measured: float) -> float:
    """The mean of both values, limited to a factor of 2 from `old`."""
    return min(max((old + measured) / 2, old / 2), 2 * old)


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
    def __init__(self, stage: Stage, weight: float) -> None:
        self.stage, self.weight, self.charged = stage, weight, 0.0
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

    def charge(self, job: J, seconds: float) -> None:
        """Charge a tenant, unless it has had no jobs for long."""
        if (flow := self.flows.get(job.tenant) or self._idle.get(job.tenant)) is not None:
            flow.charged += seconds

    def remove(self, job: J) -> None:
        flow = self.flows[job.tenant]
        del flow.jobs[job]
        if not flow.jobs:
            self._idle[job.tenant] = self.flows.pop(job.tenant)
            if len(self._idle) > _IDLE_FLOWS:
                self._idle = {tenant: flow for tenant, flow in self._idle.items() if flow.charged > self.now}


class RunnableJobs(Generic[J]):
    """The runnable jobs: start-time fair queueing over two levels, between stages (inference has the larger weight, so
    it precedes fine-tuning without starving it) and between the tenants of a stage. A tenant is charged with its rows'
    share of the time of a product: a few rows alone cost as much as reading the weights, and less in a batch. The
    tenant that was charged least is served next. An idle tenant accrues no credit. All connections of a tenant share
    one queue."""

    def __init__(self, inference_weight: float, slice_s: float) -> None:
        self._slice_s = slice_s
        levels: list[_Level[J]] = [_Level("inference", inference_weight), _Level("fine_tuning", 1.0)]
        self._levels = {level.stage: level for level in levels}
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
        """Advance the virtual times: this job leads the next product. A stage whose rows have joined products of the
        other one pays for one slice of them at most: otherwise it would not be served for as long as they took."""
        level = self._levels[leader.stage]
        self._now = max(self._now, level.charged)
        for each in self._levels.values():
            each.charged = min(each.charged, self._now + self._slice_s)
        level.now = max(level.now, self.charged(leader))

    def charge(self, job: J, seconds: float) -> None:
        """Charge a job's stage and tenant with executor time."""
        level = self._levels[job.stage]
        level.charged += seconds / level.weight
        level.charge(job, seconds / job.weight)

    def charged(self, job: J) -> float:
        """Charge of the job's tenant in the job's stage."""
        return self._levels[job.stage].flows[job.tenant].charged

    def least_charged(self, stage: Stage) -> float:
        """Charge of the stage's next tenant."""
        return min(flow.charged for flow in self._levels[stage].flows.values())

    def counts(self) -> dict[Stage, int]:
        return {stage: sum(len(flow.jobs) for flow in level.flows.values()) for stage, level in self._levels.items()}

    def of_key(self, key: Key) -> list[J]:
        """The jobs with this key, which can share a product; oldest first."""
        return list(self._by_key[key])

    def in_turn(self) -> Iterator[tuple[Stage, list[J]]]:
        """Yield each stage that has jobs with the first job of each of its tenants. Stages and tenants are sorted by
        charge, tenants with equal charges by the arrival of their jobs."""
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
