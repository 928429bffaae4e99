"""The scheduler: keeps jobs, and hands out their rows (docs/provider.md lists its rules). Requests for the same layer
group share a product, and wait to be batched where that saves time.

* **Choice.** A request that is passed over is reached by the tenants behind it, and shares its later products with
  them. The choice delays no product, because the executor always has other work.
* **Waiting.** The saving is the difference between two products and one: the time to read the weights once more, less
  if the products have many rows. The cost is the sum of the waiting times of all waiting tenants. A request waits for
  at most `WAIT_SHARE` of the time of its own product, for at most `MAX_WAIT_S`, and only while another tenant is
  expected to ask for the same layer group in time (`_Absent`).
* **Added rows.** Inference requests join every product, whole. A fine-tuning request joins if its tenant is within one
  slice of its turn, and is cut to the remaining room. When inference is due, it makes the product take half as long
  again at most: many large requests for one layer group would otherwise make every row of inference wait for a slice.
* **Inference beside fine-tuning.** A fine-tuning request waits for an inference tenant that is about to ask for its
  next layer group: once, from when it could first lead, and no longer than it would wait to be batched.
"""

import heapq
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple

from provider.config.schema import MAX_BATCH_ROWS
from provider.scheduler.jobs import ARITHMETIC_ROWS, J, Job, Key, Pace, Piece, RunnableJobs, Stage

SLICE_S = 0.020
"""Target time of one product. A request waits about this long for another tenant's product."""
INFERENCE_WEIGHT = 4.0
"""Share of inference relative to fine-tuning when both want the whole executor."""
MAX_WAIT_S = 0.005
"""Longest time that a request waits to be batched."""
WAIT_SHARE = 0.5
"""A request waits to be batched for at most this share of its own product's time."""
_LATE = 2.0  # a tenant is expected until its pause is this many times its usual pause
_SLOWDOWN = 0.5  # a product of due inference may take longer by this share of its own time
_HORIZON_WAITS = 10  # a tenant is expected for this many times `MAX_WAIT_S`
_GENERATING_S = 1.0  # somebody generates until this long after the last inference request
_SLICES_OF_TRAINING = 8  # slices of a product while nobody generates
_MOST_LATE = 2.0  # a product that takes longer is charged as if it took this many times the expected time
_MAX_LEAD = 8  # layer groups: the largest lead that counts


def fill(jobs: list[J], room: int, *, cut: bool = False) -> list[Piece[J]]:
    """Pieces of the jobs in this order, up to `room` rows: with all ready rows of a job, or `cut` to the room."""
    pieces = []
    for job in jobs:
        piece = Piece.next_of(job, room if cut else job.rows)
        if 0 < piece.rows <= room:
            pieces.append(piece)
            room -= piece.rows
    return pieces


class _Expected(NamedTuple):
    """When requests for one layer group are expected, in seconds of the scheduler's clock."""

    first: float
    until: float


_NONE_EXPECTED = _Expected(math.inf, -math.inf)


class _Absence(NamedTuple):
    stage: Stage
    key: Key
    since: float


class _Absent:
    """Predicts the next requests of tenants whose requests are all answered: tenants go through a model in the same
    order, and a tenant's pause between two requests takes about as long as its previous pause. A tenant that has been
    absent for longer than `horizon_s` is not expected any more."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self.tenants: OrderedDict[Hashable, _Absence] = OrderedDict()  # in order of their last answers
        self._pauses: dict[Hashable, float] = {}
        self._next: dict[tuple[Stage, Key], Key] = {}

    def departed(self, job: Job, now: float) -> None:
        """Record that all requests of the job's tenant are answered; the job was the last one."""
        self.tenants.pop(job.tenant, None)
        self.tenants[job.tenant] = _Absence(job.stage, job.key, now)
        while self.tenants[oldest := next(iter(self.tenants))].since < now - self._horizon_s:
            del self.tenants[oldest]
            self._pauses.pop(oldest, None)

    def arrived(self, job: Job) -> None:
        """Learn the tenant's pause and the order of keys from its next job."""
        absence = self.tenants.pop(job.tenant, None)
        if absence is not None and absence.stage == job.stage:
            pause = max(0.0, job.arrival - absence.since)
            self._pauses[job.tenant] = (self._pauses.get(job.tenant, pause) + pause) / 2
            self._next[job.stage, absence.key] = job.key

    def after(self, stage: Stage, key: Key) -> Iterator[Key]:
        """Yield the known keys that follow a key. Never ends if the order of keys is a cycle."""
        while (found := self._next.get((stage, key))) is not None:
            yield (key := found)

    def expected(self, now: float, by: float) -> dict[tuple[Stage, Key], _Expected]:
        """The requests that are expected between `now` and `by`, for each stage and key."""
        found: dict[tuple[Stage, Key], _Expected] = {}
        for tenant, (stage, key, since) in reversed(self.tenants.items()):
            if since < now - self._horizon_s:
                break
            pause = self._pauses.get(tenant)
            first = since + (pause or 0.0)
            until = since + (self._horizon_s if pause is None else _LATE * pause)
            if first <= by and now < until:
                coming = stage, self._next.get((stage, key), key)
                others = found.get(coming, _NONE_EXPECTED)
                found[coming] = _Expected(min(max(now, first), others.first), max(until, others.until))
        return found


class Scheduler(Generic[J]):
    """Waiting jobs, and the order in which their rows are multiplied. Not thread-safe."""

    def __init__(self) -> None:
        self.pace = Pace(SLICE_S)
        self._waiting: RunnableJobs[J] = RunnableJobs(INFERENCE_WEIGHT, SLICE_S)
        self._slice_s, self._max_wait_s, self._wait_share = SLICE_S, MAX_WAIT_S, WAIT_SHARE
        self._absent = _Absent(_HORIZON_WAITS * MAX_WAIT_S)
        self._jobs: Counter[Hashable] = Counter()  # per tenant, runnable or not
        self._deadlines: list[tuple[float, int, J]] = []
        self._order = itertools.count()
        self._expected = 0.0  # seconds that the rows taken last were charged with
        self._max_batch_rows = MAX_BATCH_ROWS
        self._generating_until = -math.inf

    def waiting(self) -> dict[Stage, int]:
        """Number of runnable jobs by stage."""
        return self._waiting.counts()

    def put(self, job: J) -> None:
        if job.tenant not in self._jobs:
            self._absent.arrived(job)
        self._notice(job)
        self._jobs[job.tenant] += 1
        heapq.heappush(self._deadlines, (job.deadline, next(self._order), job))
        if job.runnable:
            self._waiting.add(job)

    def make_ready(self, job: J, rows: int) -> None:
        """Mark `rows` more rows of a job as ready. Does nothing if the job has left."""
        if job.left:
            return
        was = job.runnable
        job.ready += rows
        if not was and job.runnable:
            self._waiting.add(job)

    def drop(self, job: J) -> None:
        """Forget a job. Does nothing if the job has left."""
        if not job.left:
            if job.runnable:
                self._waiting.remove(job)
            self._leave(job)

    def expire(self, now: float) -> list[J]:
        """Drop the jobs whose deadline has passed, and return them."""
        expired = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].left):
            job = heapq.heappop(self._deadlines)[2]
            if not job.left:
                self.drop(job)
                expired.append(job)
        return expired

    def take(self, now: float) -> list[Piece[J]]:
        """Return the rows to multiply now, all of one key. Empty if no job is runnable, or if jobs wait to be
        batched."""
        leader, _ = self._next_leader(now)
        if leader is None:
            return []
        self._waiting.serve(leader)
        pieces = self._batch(leader, self.room(leader))
        self._expected = self._charge(pieces)
        for job, _, stop in pieces:
            job.taken = stop
            if stop == job.rows or not job.runnable:
                self._waiting.remove(job)
            if stop == job.rows:
                self._leave(job)
        return pieces

    def _charge(self, pieces: Sequence[Piece[J]], times: float = 1.0) -> float:
        """Charge each tenant with its part of `times` the expected duration of a product, which is returned."""
        total = sum(piece.rows for piece in pieces)
        seconds = self.pace.seconds(pieces[0].job, total)
        for piece in pieces:
            job, its_seconds = piece.job, seconds * piece.rows / total
            if job.key.by_expert:  # rows for other experts share no reading of weights
                its_seconds = self.pace.seconds(job, piece.rows)
            self._waiting.charge(job, times * its_seconds * job.row_cost / max(1, job.row_work))
        return seconds

    def room(self, job: J) -> int:
        """Most rows of a product that a job leads: those of one slice. While nobody generates, several slices, in
        products of equal size: each product prepares the weights again, and takes more of a processor's time per row
        the fewer its rows are."""
        if job.arrival <= self._generating_until:
            return min(self._max_batch_rows, self.pace.rows(job))
        most, left = min(self._max_batch_rows, self.pace.rows(job, slices=_SLICES_OF_TRAINING)), job.rows - job.taken
        return most if left <= most else math.ceil(left / math.ceil(left / most))

    def is_alone(self, job: J) -> bool:
        """Returns False if a job has to be put, because it has many rows, or because other tenants wait or are
        expected."""
        absent = self._absent.tenants
        return not self._jobs and job.rows <= ARITHMETIC_ROWS and len(absent) == (job.tenant in absent)

    def take_alone(self, job: J) -> list[Piece[J]]:
        """Take all rows of a job that `is_alone` at once, instead of `put` and `take`. The tenant is not charged: no
        other tenant waits for a turn."""
        self._absent.arrived(job)
        self._notice(job)
        job.taken, job.left, self._expected = job.rows, True, 0.0
        return [Piece(job, 0, job.rows)]

    def next_deadline(self, now: float) -> float | None:
        """Time to call `expire` and `take` again if no job arrives before; None without such a time."""
        while self._deadlines and self._deadlines[0][2].left:
            heapq.heappop(self._deadlines)
        leader, again = self._next_leader(now)
        if leader is not None:
            return now
        times = [self._deadlines[0][0]] if self._deadlines else []
        return min(times if again is None else [*times, again], default=None)

    def done(self, pieces: Sequence[Piece[J]], *, now: float, seconds: float, matrices: int = 1) -> None:
        """Record that the pieces of a batch have been multiplied in `seconds`, with this number of matrices."""
        if self._expected:
            self._charge(pieces, min(seconds / self._expected, _MOST_LATE) - 1)
            self._expected = 0.0
        rows = work = 0
        for job, start, stop in pieces:
            rows += stop - start
            work += (stop - start) * job.row_work
        self.pace.record(pieces[0].job.key, rows=rows, work=work, seconds=seconds, matrices=matrices)
        for piece in pieces:
            if piece.job.tenant not in self._jobs:
                self._absent.departed(piece.job, now)

    def _notice(self, job: J) -> None:
        if job.stage == "inference":
            self._generating_until = job.arrival + _GENERATING_S

    def _leave(self, job: J) -> None:
        job.left = True
        self._jobs[job.tenant] -= 1
        if not self._jobs[job.tenant]:
            del self._jobs[job.tenant]

    # The order of products

    def _next_leader(self, now: float) -> tuple[J | None, float | None]:
        """Return the job that leads the next product; or None, and the time to call again (None: after an event)."""
        waiting: list[float] = []
        if not self._waiting:
            return None, None
        expected = self._absent.expected(now, now + self._max_wait_s)
        for stage, firsts in self._waiting.in_turn():
            times = self._go_times(stage, firsts, now, expected)
            may_go = [job for job, time in zip(firsts, times, strict=True) if time <= now]
            if may_go:
                return self._choice(stage, firsts, may_go, now), None
            waiting += times
            if stage == "inference":
                break  # a slice of fine-tuning takes far longer than the wait to be batched
        return None, min(waiting, default=None)

    def _go_times(
        self, stage: Stage, firsts: Sequence[J], now: float, expected: Mapping[tuple[Stage, Key], _Expected]
    ) -> list[float]:
        """For each job, the time until which it waits to be batched, or waits for inference. Both waits begin when the
        job was first able to lead: nothing that others send begins them again."""
        inference: list[_Expected] = []
        if stage == "fine_tuning" and self._waiting.inference_is_due():
            inference = [each for (kind, _), each in expected.items() if kind == "inference"]
        first = min((each.first for each in inference), default=math.inf)
        until = max((each.until for each in inference), default=-math.inf)
        times = []
        worth: dict[tuple[Key, int], float] = {}  # many jobs have the same key and number of rows
        for job in firsts:
            time = job.offered = min(job.offered, now)
            others = expected.get((stage, job.key))
            if others is not None and not job.taken:
                like = job.key, job.rows
                if like not in worth:
                    worth[like] = self._worth(job)
                limit = job.offered + worth[like]
                if others.first <= limit:
                    time = min(limit, others.until)
            limit = job.offered + self._patience(job)
            if first <= limit:
                time = max(time, min(limit, until))
            times.append(time)
        return times

    def _worth(self, job: J) -> float:
        """Seconds for which waiting to be batched costs less than it saves."""
        seconds = self.pace.seconds
        rows = sum(other.ready - other.taken for other in self._waiting.of_key(job.key))
        saved = seconds(job, rows) + seconds(job, job.rows) - seconds(job, rows + job.rows)
        return min(saved / self._tenants(job.key), self._patience(job))

    def _patience(self, job: J) -> float:
        return min(self._wait_share * self.pace.seconds(job, job.rows), self._max_wait_s)

    def _tenants(self, key: Key) -> int:
        return len({job.tenant for job in self._waiting.of_key(key)})

    def _choice(self, stage: Stage, firsts: Sequence[J], may_go: Sequence[J], now: float) -> J:
        """Pick the job that leads the next product, from the jobs that need not wait."""
        if len(may_go) == 1:
            return may_go[0]
        most = self._waiting.charged(may_go[0]) + self._max_wait_s
        in_share = [job for job in may_go if self._waiting.charged(job) <= most]
        longest = min(in_share, key=lambda job: job.offered)
        if now - longest.offered >= self._slice_s:
            return longest
        heads: dict[Key, J] = {}  # the first job of each key, in order of fair shares
        for job in in_share:
            heads.setdefault(job.key, job)
        if len(heads) == 1:
            return in_share[0]
        # for each key, the number of layer groups between it and the next waiting tenant behind it
        leads = dict.fromkeys([job.key for job in firsts], _MAX_LEAD)
        for behind in leads:
            for steps, ahead in zip(range(1, _MAX_LEAD), self._absent.after(stage, behind), strict=False):
                if ahead in leads:
                    leads[ahead] = min(leads[ahead], steps)
                    break
        return max(heads.values(), key=lambda job: (leads[job.key], self._tenants(job.key)))

    def _batch(self, leader: J, room: int) -> list[Piece[J]]:
        """Return the pieces of a product of at most `room` rows that `leader` leads. Includes rows of `leader`."""
        others = [job for job in self._waiting.of_key(leader.key) if job is not leader]
        if leader.key.by_expert:  # rows for more experts take longer, and the room is counted in rows of the leader
            others = [job for job in others if self.pace.rows(job) >= self.pace.rows(leader)]
        if not others:
            return [Piece.next_of(leader, room)]
        others.sort(key=lambda job: (self._waiting.charged(job), job.arrival))
        inference = [job for job in others if job.stage == "inference"]
        fine_tuning = [job for job in others if job.stage == "fine_tuning"]
        if leader.stage == "inference":
            first = Piece.next_of(leader, room)
            pieces = [first, *fill(inference, room - first.rows)]
            most = self._waiting.least_charged("fine_tuning") + self._slice_s if fine_tuning else 0.0
            filling = [job for job in fine_tuning if self._waiting.charged(job) <= most]
            if self._waiting.inference_is_due():
                rows = sum(piece.rows for piece in pieces)  # added rows take time even if the weights are read anyway
                room = min(room, rows + self.pace.rows_in(leader, _SLOWDOWN * self.pace.seconds(leader, rows)))
        else:
            pieces = fill(inference, room - Piece.next_of(leader, max(1, room // 2)).rows)
            filling = [leader, *fine_tuning]
        return pieces + fill(filling, room - sum(piece.rows for piece in pieces), cut=True)
