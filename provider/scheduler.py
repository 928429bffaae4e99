"""Which rows are multiplied next: batches per layer group, fair between tenants, bounded slices, bounded waits.

Theory of operation. A `Scheduler` is a pure object: it holds jobs, is told the time, and knows nothing of sockets,
threads or tensors.

* **Slices.** `take` hands out pieces: some rows of one or several jobs for one layer group, direction and arithmetic. A
  product is never larger than what `Pace` expects to take `slice_s`, so that nobody waits for more than one slice of
  somebody else's work. A job that is larger is taken piece by piece, and others have their turns in between.
* **Fair shares.** Start-time fair queueing over two levels: between stages (inference weighs more, so it goes ahead of
  fine-tuning and cannot starve it) and between the tenants of a stage. Whoever's rows are taken is charged their cost;
  who has been charged least goes first; who was away has saved nothing up. A tenant is one queue, however many
  connections it has.
* **Batches.** The job whose turn it is leads; jobs for the same layer group, direction and arithmetic ride with it,
  rows beside rows. Fine-tuning does not ride with inference: it would make it wait.
* **Waiting.** `none` batches nothing. `opportunistic` lets a leader wait for company for a share of the time that its
  own product takes, and only while somebody is expected: a tenant that was active a moment ago and asks for nothing
  now. When there is a choice, it takes the layer group that most tenants of the stage wait for; nobody is passed over
  so for longer than a slice. `lockstep` waits until every active tenant has asked, and lets those who are behind go
  first; it is for comparison.

Times are seconds of one monotonic clock; work and cost are multiply-adds.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from symbiosis_priv import wire
from symbiosis_priv.ring import FORWARD, Direction

Stage = Literal["inference", "fine_tuning"]
PolicyName = Literal["none", "lockstep", "opportunistic"]
Key = tuple[int, Direction, wire.Arithmetic]

_FIRST_GUESS = 2e9  # multiply-adds a second, until a product has been timed
_TELLING_ROWS = 8  # fewer rows take as long as these: they say nothing about the pace of many
_RECENT_WAITS = 10  # a tenant is expected back for so many times the longest wait
_IDLE_FLOWS = 64  # tenants without jobs that are remembered before a sweep


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How jobs are batched and how long they wait for company.

    Args:
        name: `none`, `lockstep` or `opportunistic`.
        max_batch_rows: rows of one product.
        slice_s: what one product may be expected to take.
        wait_share: the share of its own product's time that a job waits for company.
        max_wait_s: and never longer than this.
        lockstep_wait_s: how long `lockstep` waits for a tenant, and for how long it counts as active.
        inference_weight: how much more of the executor inference gets than fine-tuning when both want all of it.
    """

    name: PolicyName = "opportunistic"
    max_batch_rows: int = 16_384
    slice_s: float = 0.02
    wait_share: float = 0.5
    max_wait_s: float = 0.002
    lockstep_wait_s: float = 0.1
    inference_weight: float = 4.0


@dataclass(kw_only=True, eq=False)
class Job:
    """One request's rows.

    Args:
        tenant: whose turn it takes.
        stage: of the tenant's work.
        key: layer group, direction and arithmetic: what it can share a product with.
        rows: may be 0.
        row_work: multiply-adds of one row's product.
        row_cost: what one row is charged with; more than `row_work` if it takes other work too.
        arrival: when it came.
        deadline: when it is worth nothing any more.
        weight: of its tenant.
        ready: rows that can be multiplied now; a helper's come as their keystream is made.
        taken: rows that `take` has handed out.
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

    @property
    def runnable(self) -> bool:
        """Whether `take` could hand it out."""
        return self.taken < self.ready or not self.rows


J = TypeVar("J", bound=Job)


@dataclass(frozen=True)
class Piece(Generic[J]):
    """Rows `start .. stop` of a job."""

    job: J
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.start

    @property
    def last(self) -> bool:
        """Whether the job ends with it."""
        return self.stop == self.job.rows


class Pace:
    """How fast products run, learned from those that have run: what a slice's rows are cut by."""

    def __init__(self, slice_s: float) -> None:
        self._slice_s = slice_s
        self._rates: dict[tuple[Direction, wire.Arithmetic], float] = {}

    def rows(self, job: Job) -> int:
        """Rows of the job's kind that take about one slice; never so few that nothing more is learned from them."""
        return max(_TELLING_ROWS, int(self._slice_s * self._rate(job.key) / max(1, job.row_work)))

    def seconds(self, job: Job) -> float:
        """What the whole job's product takes."""
        return job.rows * job.row_work / self._rate(job.key)

    def record(self, key: Key, *, rows: int, work: int, seconds: float) -> None:
        """A product of `work` multiply-adds took `seconds`. One outlier moves the estimate by a factor of 2 at most."""
        if rows < _TELLING_ROWS or not work:
            return
        old = self._rate(key)
        measured = work / max(seconds, 1e-9)
        self._rates[key[1:]] = min(max((old + measured) / 2, old / 2), 2 * old)

    def _rate(self, key: Key) -> float:
        return self._rates.get(key[1:], _FIRST_GUESS)


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

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.charged = 0.0
        self.now = 0.0  # the virtual time: what the flow that was served last had been charged before
        self.waiting: dict[Hashable, _Flow[J]] = {}
        self._idle: dict[Hashable, _Flow[J]] = {}

    def add(self, job: J) -> None:
        flow = self.waiting.get(job.tenant)
        if flow is None:
            flow = self._idle.pop(job.tenant, None) or _Flow()
            flow.charged = max(flow.charged, self.now)
            self.waiting[job.tenant] = flow
        _line_up(job, flow.jobs)

    def remove(self, job: J) -> None:
        flow = self.waiting[job.tenant]
        del flow.jobs[job]
        if not flow.jobs:
            self._idle[job.tenant] = self.waiting.pop(job.tenant)
            if len(self._idle) > _IDLE_FLOWS:
                self._idle = {tenant: flow for tenant, flow in self._idle.items() if flow.charged > self.now}

    def charge(self, job: J, cost: float) -> None:
        self.charged += cost / self.weight
        self.waiting[job.tenant].charged += cost / job.weight

    def flows(self) -> list[_Flow[J]]:
        """Least charged first; of equals, the one that waits longest."""
        return sorted(self.waiting.values(), key=lambda flow: (flow.charged, flow.first.arrival))


class Scheduler(Generic[J]):
    """Jobs that wait, and the order in which their rows are multiplied. Not thread-safe.

    Args:
        policy: see `Policy`.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.pace = Pace(policy.slice_s)
        self._levels: dict[Stage, _Level[J]] = {
            "inference": _Level(policy.inference_weight),
            "fine_tuning": _Level(1.0),
        }
        self._now = 0.0  # virtual time between the stages
        self._by_key: dict[Key, OrderedDict[J, None]] = {}
        self._jobs: Counter[Hashable] = Counter()  # per tenant, runnable or not
        self._deadlines: list[tuple[float, int, J]] = []
        self._order = itertools.count()
        self._seen: dict[Hashable, float] = {}  # when a tenant last asked or was answered; the latest is last

    def __len__(self) -> int:
        """Jobs that have rows left to be taken."""
        return self._jobs.total()

    def waiting(self) -> dict[Stage, int]:
        """Runnable jobs by stage."""
        return {stage: sum(len(flow.jobs) for flow in level.waiting.values()) for stage, level in self._levels.items()}

    def put(self, job: J) -> None:
        """Take a job in."""
        self._jobs[job.tenant] += 1
        heapq.heappush(self._deadlines, (job.deadline, next(self._order), job))
        self._note(job.tenant, job.arrival)
        if job.runnable:
            self._enqueue(job)

    def make_ready(self, job: J, rows: int) -> None:
        """`rows` more rows of a job can be multiplied; does nothing if it has left."""
        if job.left:
            return
        was = job.runnable
        job.ready += rows
        if not was and job.runnable:
            self._enqueue(job)

    def drop(self, job: J) -> None:
        """Forget a job; does nothing if it has left."""
        if not job.left:
            if job.runnable:
                self._dequeue(job)
            self._leave(job)

    def expire(self, now: float) -> list[J]:
        """The jobs whose deadline has passed; they are dropped."""
        expired = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].left):
            job = heapq.heappop(self._deadlines)[2]
            if not job.left:
                self.drop(job)
                expired.append(job)
        return expired

    def take(self, now: float) -> list[Piece[J]]:
        """Rows to multiply now, all of one key; empty if there are none, or if they wait for company."""
        leader = next((job for job in self._leaders() if self._may_go(job, now)), None)
        if leader is None:
            return []
        if self.policy.name == "opportunistic" and now - leader.arrival < self.policy.slice_s:
            leader = self._in_best_company(leader, now)
        return self._batch(leader)

    def next_deadline(self, now: float) -> float | None:
        """When to call `expire` and `take` again if nothing else happens; None if there is nothing to wait for."""
        while self._deadlines and self._deadlines[0][2].left:
            heapq.heappop(self._deadlines)
        times = [self._deadlines[0][0]] if self._deadlines else []
        times += [self._go_time(job, now) for job in self._leaders()]
        return min(times, default=None)

    def done(self, pieces: Iterable[Piece[J]], *, now: float, seconds: float) -> None:
        """A batch has been multiplied in so many seconds: learn from it."""
        pieces = list(pieces)
        rows = sum(piece.rows for piece in pieces)
        work = sum(piece.rows * piece.job.row_work for piece in pieces)
        self.pace.record(pieces[0].job.key, rows=rows, work=work, seconds=seconds)
        for piece in pieces:
            self._note(piece.job.tenant, now)

    # Whose turn it is

    def _leaders(self) -> Iterator[J]:
        """The oldest job of every tenant and stage, in the order in which they should go."""
        if self.policy.name == "lockstep":
            yield from self._those_behind()
            return
        levels = [level for level in self._levels.values() if level.waiting]
        for level in sorted(levels, key=lambda level: level.charged):
            for flow in level.flows():
                yield flow.first

    def _those_behind(self) -> list[J]:
        """The oldest job of each key: the forward pass first, and there the first layers; backward the last ones."""
        keys = sorted(self._by_key, key=lambda k: (k[1] != FORWARD, k[0] if k[1] == FORWARD else -k[0], k[2]))
        return [next(iter(self._by_key[key])) for key in keys]

    def _may_go(self, job: J, now: float) -> bool:
        return self._go_time(job, now) <= now

    def _go_time(self, job: J, now: float) -> float:
        """When a job need not wait for company any more."""
        policy = self.policy
        if policy.name == "none" or job.taken:
            return job.arrival
        if policy.name == "lockstep":
            wait, horizon = policy.lockstep_wait_s, policy.lockstep_wait_s
        else:
            wait = min(policy.max_wait_s, policy.wait_share * self.pace.seconds(job))
            horizon = _RECENT_WAITS * policy.max_wait_s
        latest = job.arrival + wait
        return latest if latest > now and self._somebody_expected(now - horizon) else job.arrival

    def _somebody_expected(self, since: float) -> bool:
        """Whether a tenant that was active since then asks for nothing now."""
        for tenant in reversed(self._seen):
            if self._seen[tenant] < since:
                return False
            if not self._jobs[tenant]:
                return True
        return False

    def _in_best_company(self, leader: J, now: float) -> J:
        """Of a stage's leaders, the one that most tenants can ride with: whoever is passed over meets company later."""
        flows = self._levels[leader.stage].flows()
        leaders = [flow.first for flow in flows if self._may_go(flow.first, now)]
        return max(leaders, key=lambda job: len({other.tenant for other in self._by_key[job.key]}))

    # What goes with it

    def _batch(self, leader: J) -> list[Piece[J]]:
        level = self._levels[leader.stage]
        self._now = max(self._now, level.charged)
        level.now = max(level.now, level.waiting[leader.tenant].charged)
        room = min(self.policy.max_batch_rows, self.pace.rows(leader))
        pieces = [self._cut(leader, min(leader.ready - leader.taken, room))]
        room -= pieces[0].rows
        if self.policy.name != "none":
            for job in self._riders(leader):
                rows = job.ready - job.taken
                if rows <= room:  # whole, or not at all: only a leader is worth a copy
                    pieces.append(self._cut(job, rows))
                    room -= rows
        return pieces

    def _riders(self, leader: J) -> list[J]:
        """Who may share the leader's product, in the order of their turns."""
        same = self._by_key.get(leader.key, ())
        fine_tuning_too = leader.stage == "fine_tuning"
        riders = [j for j in same if j is not leader and (fine_tuning_too or j.stage == "inference")]
        flows = {stage: level.waiting for stage, level in self._levels.items()}
        return sorted(riders, key=lambda j: (j.stage != "inference", flows[j.stage][j.tenant].charged, j.arrival))

    def _cut(self, job: J, rows: int) -> Piece[J]:
        """Hand out the next rows of a job."""
        piece = Piece(job, job.taken, job.taken + rows)
        self._levels[job.stage].charge(job, rows * job.row_cost)
        job.taken = piece.stop
        if piece.last or not job.runnable:
            self._dequeue(job)
        if piece.last:
            self._leave(job)
        return piece

    # Book-keeping

    def _enqueue(self, job: J) -> None:
        level = self._levels[job.stage]
        if not level.waiting:
            level.charged = max(level.charged, self._now)
        level.add(job)
        same = self._by_key.setdefault(job.key, OrderedDict())
        _line_up(job, same)

    def _dequeue(self, job: J) -> None:
        self._levels[job.stage].remove(job)
        same = self._by_key[job.key]
        del same[job]
        if not same:
            del self._by_key[job.key]

    def _leave(self, job: J) -> None:
        job.left = True
        self._jobs[job.tenant] -= 1
        if not self._jobs[job.tenant]:
            del self._jobs[job.tenant]

    def _note(self, tenant: Hashable, now: float) -> None:
        """The tenant was active; those of whom nothing was seen for long are forgotten."""
        self._seen.pop(tenant, None)
        self._seen[tenant] = now
        horizon = now - max(self.policy.lockstep_wait_s, _RECENT_WAITS * self.policy.max_wait_s)
        while self._seen[oldest := next(iter(self._seen))] < horizon:
            del self._seen[oldest]


def _line_up(job: J, line: OrderedDict[J, None]) -> None:
    """At the end, or in front if some of its rows have been taken: what has begun is finished first."""
    line[job] = None
    if job.taken:
        line.move_to_end(job, last=False)
