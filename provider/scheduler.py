"""Which rows are multiplied next: batches per layer group, fair between tenants, bounded slices, bounded waits.

Theory of operation. A `Scheduler` is a pure object: it holds jobs, is told the time, and knows nothing of sockets,
threads or tensors.

* **Slices.** `take` hands out pieces: some rows of one or several jobs for one layer group, direction and arithmetic. A
  product is never larger than what `Pace` expects to take `slice_s`, so that nobody waits for more than one slice of
  somebody else's work. A job that is larger is taken piece by piece, and others have their turns in between.
* **Fair shares.** Start-time fair queueing over two levels: between stages (inference weighs more, so it goes ahead of
  fine-tuning and cannot starve it) and between the tenants of a stage. Whoever's rows are taken is charged their part
  of the time that the product takes: a few rows alone cost what reading the weights costs, and less in company. Who has
  been charged least goes first; who was away has saved nothing up. A tenant is one queue, however many connections it
  has.
* **Batches.** The job whose turn it is leads; jobs for the same layer group, direction and arithmetic ride with it,
  rows beside rows. Fine-tuning does not ride with inference: it would make it wait.
* **Waiting.** `none` batches nothing. `opportunistic` lets a leader wait for company for a share of the time that its
  own product takes, and only while somebody is expected in time who will ask for the same layer group: tenants go
  through a model in the same order, and what each does between two requests takes about as long as it did before
  (`Absent`). When there is a choice, it takes the layer group that most tenants of the stage wait for; nobody is passed
  over so for longer than a slice. `lockstep` waits until every active tenant has asked, and lets those who are behind
  go first; it is for comparison.
* **Inference beside fine-tuning.** When it is inference's turn, fine-tuning is held back for a moment for a tenant that
  is about to ask for its next layer group, or that waits for company: one row would wait many times longer for the
  slice than the slice for the row.

Times are seconds of one monotonic clock, and so are charges; work and cost are multiply-adds.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from symbiosis_priv import wire
from symbiosis_priv.ring import FORWARD, Direction

Stage = Literal["inference", "fine_tuning"]
PolicyName = Literal["none", "lockstep", "opportunistic"]
Key = tuple[int, Direction, wire.Arithmetic]

_FIRST_GUESS = 2e9  # multiply-adds a second, until a product has been timed
_TELLING_ROWS = 8  # fewer say little about what a row of many takes
_RECENT_WAITS = 10  # a tenant counts as active for so many times the longest wait
_LATE = 2.0  # a tenant is expected back until its pause has been so many times the usual one
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
    max_wait_s: float = 0.005
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
    offered: float | None = None
    """When it could have gone first: what it waits for company counts from there."""

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
    """How fast products run, learned from those that have run: what a slice's rows are cut by.

    A product takes the time in which its weights are read, and then some for every row. Few rows tell about the first,
    many about the second.
    """

    def __init__(self, slice_s: float) -> None:
        self._slice_s = slice_s
        self._reads: dict[tuple[Direction, wire.Arithmetic], float] = {}  # seconds per weight
        self._rates: dict[tuple[Direction, wire.Arithmetic], float] = {}  # multiply-adds a second, the weights at hand

    def rows(self, job: Job) -> int:
        """Rows of the job's kind that take about one slice; never so few that nothing more is learned from them."""
        work = max(1, job.row_work)
        seconds = max(self._slice_s / 2, self._slice_s - self._read(job.key) * work)
        return max(_TELLING_ROWS, int(seconds * self._rate(job.key) / work))

    def seconds(self, job: Job, rows: int) -> float:
        """What a product of so many rows of the job's kind takes."""
        return (self._read(job.key) + rows / self._rate(job.key)) * job.row_work if rows else 0.0

    def record(self, key: Key, *, rows: int, work: int, seconds: float) -> None:
        """A product of `work` multiply-adds took `seconds`. One outlier moves the estimate by a factor of 2 at most."""
        if not work:
            return
        weights, kind = work / rows, key[1:]
        if rows < _TELLING_ROWS:
            self._rates[kind] = max(self._rate(key), work / max(seconds, 1e-9))
            read = max(0.0, seconds / weights - rows / self._rate(key))
            self._reads[kind] = _nearer(self._read(key) or read, read)
        else:
            for_rows = max(seconds / 2, seconds - self._read(key) * weights, 1e-9)
            self._rates[kind] = _nearer(self._rate(key), work / for_rows)

    def _read(self, key: Key) -> float:
        return self._reads.get(key[1:], 0.0)

    def _rate(self, key: Key) -> float:
        return self._rates.get(key[1:], _FIRST_GUESS)


def _nearer(old: float, measured: float) -> float:
    """Halfway, and by a factor of 2 at most."""
    return min(max((old + measured) / 2, old / 2), 2 * old)


@dataclass(frozen=True)
class Expected:
    """Somebody will ask for a layer group: the first at `first`, and nobody after `until`."""

    first: float
    until: float

    def __or__(self, other: Expected | None) -> Expected:
        if other is None:
            return self
        return Expected(min(self.first, other.first), max(self.until, other.until))


@dataclass
class _Absence:
    stage: Stage
    key: Key
    since: float


class Absent:
    """Tenants that have been answered and have not asked again: what for they will, and when.

    Args:
        horizon_s: who has been away for longer is not expected.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._absent: OrderedDict[Hashable, _Absence] = OrderedDict()  # who left last is last
        self._pauses: dict[Hashable, float] = {}
        self._next: dict[tuple[Stage, Key], Key] = {}

    def leave(self, tenant: Hashable, stage: Stage, key: Key, now: float) -> None:
        """It has all its answers, the last one of this key."""
        self._absent.pop(tenant, None)
        self._absent[tenant] = _Absence(stage, key, now)
        while self._absent[oldest := next(iter(self._absent))].since < now - self._horizon_s:
            del self._absent[oldest]
            self._pauses.pop(oldest, None)

    def come(self, tenant: Hashable, stage: Stage, key: Key, now: float) -> None:
        """It asks for this key: how long it was away, and what comes after what, is learned from it."""
        absence = self._absent.pop(tenant, None)
        if absence is not None and absence.stage == stage:
            pause = max(0.0, now - absence.since)
            self._pauses[tenant] = (self._pauses.get(tenant, pause) + pause) / 2
            self._next[stage, absence.key] = key

    def expected(self, now: float, by: float) -> dict[tuple[Stage, Key], Expected]:
        """Who is likely to be back by then, for what."""
        found: dict[tuple[Stage, Key], Expected] = {}
        for tenant in reversed(self._absent):
            absence = self._absent[tenant]
            if absence.since < now - self._horizon_s:
                break
            pause = self._pauses.get(tenant)
            first = absence.since + (pause or 0.0)
            until = absence.since + (self._horizon_s if pause is None else _LATE * pause)
            if first <= by and now < until:
                will = absence.stage, self._next.get((absence.stage, absence.key), absence.key)
                found[will] = Expected(max(now, first), until) | found.get(will)
        return found


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
        self._absent = Absent(_RECENT_WAITS * policy.max_wait_s)
        self._seen: dict[Hashable, float] = {}  # when a tenant last asked or was answered; the latest is last
        self._free = 0.0  # since when nothing is multiplied

    def __len__(self) -> int:
        """Jobs that have rows left to be taken."""
        return self._jobs.total()

    def waiting(self) -> dict[Stage, int]:
        """Runnable jobs by stage."""
        return {stage: sum(len(flow.jobs) for flow in level.waiting.values()) for stage, level in self._levels.items()}

    def put(self, job: J) -> None:
        """Take a job in."""
        if not self._jobs[job.tenant]:
            self._absent.come(job.tenant, job.stage, job.key, job.arrival)
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
        leader, _ = self._turn(now)
        if leader is None:
            return []
        return self._batch(leader)

    def next_deadline(self, now: float) -> float | None:
        """When to call `expire` and `take` again if nothing else happens; None if there is nothing to wait for."""
        while self._deadlines and self._deadlines[0][2].left:
            heapq.heappop(self._deadlines)
        _, again = self._turn(now)
        times = [self._deadlines[0][0]] if self._deadlines else []
        times += [] if again is None else [again]
        return min(times, default=None)

    def done(self, pieces: Iterable[Piece[J]], *, now: float, seconds: float) -> None:
        """A batch has been multiplied in so many seconds: learn from it."""
        pieces = list(pieces)
        rows = sum(piece.rows for piece in pieces)
        work = sum(piece.rows * piece.job.row_work for piece in pieces)
        self.pace.record(pieces[0].job.key, rows=rows, work=work, seconds=seconds)
        self._free = now
        for piece in pieces:
            job = piece.job
            self._note(job.tenant, now)
            if not self._jobs[job.tenant]:
                self._absent.leave(job.tenant, job.stage, job.key, now)

    # Whose turn it is

    def _turn(self, now: float) -> tuple[J | None, float | None]:
        """Whose turn it is now; or nobody's, and when to look again."""
        if self.policy.name == "lockstep":
            return _first_of([(job, self._lockstep_time(job, now)) for job in self._those_behind()], now)
        if self.policy.name == "none":
            return next((flow.first for level in self._in_turn() for flow in level.flows()), None), None
        expected = self._absent.expected(now, now + self.policy.max_wait_s)
        waiting: list[float] = []
        for level in self._in_turn():
            heads = [flow.first for flow in level.flows()]
            leader, again = _first_of([(job, self._go_time(job, now, expected)) for job in heads], now)
            if leader is not None:
                may_go = [job for job in heads if self._go_time(job, now, expected) <= now]
                return self._in_best_company(leader, may_go, now), None
            waiting += [] if again is None else [again]
            if level is self._levels["inference"]:
                break  # fine-tuning could keep it waiting for far longer than it waits for company
        return None, min(waiting, default=None)

    def _in_turn(self) -> list[_Level[J]]:
        """The stages with something to do, least charged first."""
        return sorted((level for level in self._levels.values() if level.waiting), key=lambda level: level.charged)

    def _those_behind(self) -> list[J]:
        """The oldest job of each key: the forward pass first, and there the first layers; backward the last ones."""
        keys = sorted(self._by_key, key=lambda k: (k[1] != FORWARD, k[0] if k[1] == FORWARD else -k[0], k[2]))
        return [next(iter(self._by_key[key])) for key in keys]

    def _lockstep_time(self, job: J, now: float) -> float:
        """When a job goes without those who have not asked."""
        wait = self.policy.lockstep_wait_s
        latest = job.arrival + wait
        return latest if not job.taken and latest > now and self._somebody_missing(now - wait) else job.arrival

    def _somebody_missing(self, since: float) -> bool:
        """Whether a tenant that was active since then asks for nothing now."""
        for tenant in reversed(self._seen):
            if self._seen[tenant] < since:
                return False
            if not self._jobs[tenant]:
                return True
        return False

    def _go_time(self, job: J, now: float, expected: Mapping[tuple[Stage, Key], Expected]) -> float:
        """When a job need not wait any more, for company or for inference."""
        if job.offered is None:
            job.offered = now
        time = job.offered
        company = expected.get((job.stage, job.key))
        if company is not None and not job.taken:
            limit = job.offered + min(self.policy.max_wait_s, self.policy.wait_share * self.pace.seconds(job, job.rows))
            if company.first <= limit:
                time = min(limit, company.until)
        if job.stage == "fine_tuning" and self._inference_is_due():
            limit = self._free + self.policy.max_wait_s
            coming = [e for (stage, _), e in expected.items() if stage == "inference" and e.first <= limit]
            time = max([time, *(min(limit, e.until) for e in coming)])
        return time

    def _inference_is_due(self) -> bool:
        """Whether it would go ahead of fine-tuning if it asked for something."""
        inference, fine_tuning = self._levels["inference"], self._levels["fine_tuning"]
        return max(inference.charged, self._now) <= fine_tuning.charged

    def _in_best_company(self, leader: J, may_go: Sequence[J], now: float) -> J:
        """Of a stage's leaders, the one that most tenants can ride with: whoever is passed over meets company later."""
        if now - leader.arrival >= self.policy.slice_s:
            return leader
        return max(may_go, key=lambda job: len({other.tenant for other in self._by_key[job.key]}))

    # What goes with it

    def _batch(self, leader: J) -> list[Piece[J]]:
        level = self._levels[leader.stage]
        self._now = max(self._now, level.charged)
        level.now = max(level.now, level.waiting[leader.tenant].charged)
        room = min(self.policy.max_batch_rows, self.pace.rows(leader))
        pieces = [self._piece(leader, room)]
        room -= pieces[0].rows
        if self.policy.name != "none":
            for job in self._riders(leader):
                piece = self._piece(job, job.rows)
                if piece.rows <= room:  # whole, or not at all: only a leader is worth a copy
                    pieces.append(piece)
                    room -= piece.rows
        total = sum(piece.rows for piece in pieces)
        seconds = self.pace.seconds(leader, total)
        for piece in pieces:
            self._hand_out(piece, seconds * piece.rows / max(1, total))
        return pieces

    def _riders(self, leader: J) -> list[J]:
        """Who may share the leader's product, in the order of their turns."""
        same = self._by_key.get(leader.key, ())
        fine_tuning_too = leader.stage == "fine_tuning"
        riders = [j for j in same if j is not leader and (fine_tuning_too or j.stage == "inference")]
        flows = {stage: level.waiting for stage, level in self._levels.items()}
        return sorted(riders, key=lambda j: (j.stage != "inference", flows[j.stage][j.tenant].charged, j.arrival))

    def _piece(self, job: J, most: int) -> Piece[J]:
        """The next rows of a job."""
        return Piece(job, job.taken, min(job.ready, job.taken + most))

    def _hand_out(self, piece: Piece[J], seconds: float) -> None:
        """Take a piece off its job, which is charged with its part of the product and what it costs besides."""
        job = piece.job
        self._levels[job.stage].charge(job, seconds * job.row_cost / max(1, job.row_work))
        job.taken = piece.stop
        if piece.last or not job.runnable:
            self._dequeue(job)
        if piece.last:
            self._leave(job)

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


def _first_of(candidates: Sequence[tuple[J, float]], now: float) -> tuple[J | None, float | None]:
    """The first that may go by its time; else nobody, and the earliest time."""
    for job, time in candidates:
        if time <= now:
            return job, None
    return None, min((time for _, time in candidates), default=None)


def _line_up(job: J, line: OrderedDict[J, None]) -> None:
    """At the end, or in front if some of its rows have been taken: what has begun is finished first."""
    line[job] = None
    if job.taken:
        line.move_to_end(job, last=False)
