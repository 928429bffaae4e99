"""The scheduler: keeps jobs and hands out their rows."""

import heapq
import itertools
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Generic

from provider.config.schema import PolicyName, SchedulerConfig
from provider.scheduler.discipline import Discipline, Lockstep
from provider.scheduler.jobs import ARITHMETIC_ROWS, J, Pace, Piece, RunnableJobs, Stage
from provider.scheduler.opportunistic import Opportunistic


class Scheduler(Generic[J]):
    """Waiting jobs, and the order in which their rows are multiplied. Not thread-safe."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.pace = Pace(config.slice_s)
        self._waiting: RunnableJobs[J] = RunnableJobs(config.inference_weight)
        disciplines: dict[PolicyName, type[Discipline[J]]]
        disciplines = {"none": Discipline, "lockstep": Lockstep, "opportunistic": Opportunistic}
        self._discipline = disciplines[config.policy](config, self._waiting, self.pace)
        self._jobs: Counter[Hashable] = Counter()  # per tenant, runnable or not
        self._deadlines: list[tuple[float, int, J]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        """Number of jobs with rows that were not taken."""
        return self._jobs.total()

    def waiting(self) -> dict[Stage, int]:
        """Number of runnable jobs by stage."""
        return self._waiting.counts()

    def put(self, job: J) -> None:
        if job.tenant not in self._jobs:
            self._discipline.arrived(job)
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
        leader, _ = self._discipline.next_leader(now)
        if leader is None:
            return []
        self._waiting.serve(leader)
        pieces = self._discipline.batch(leader)
        total = sum(piece.rows for piece in pieces)
        seconds = self.pace.seconds(leader, total)
        for piece in pieces:
            job, its_seconds = piece.job, seconds * piece.rows / total
            if job.key.by_expert:  # rows for other experts share no reading of weights
                its_seconds = self.pace.seconds(job, piece.rows)
            self._waiting.charge(job, its_seconds * job.row_cost / max(1, job.row_work))
            job.taken = piece.stop
            if piece.last or not job.runnable:
                self._waiting.remove(job)
            if piece.last:
                self._leave(job)
        return pieces

    def take_alone(self, job: J) -> list[Piece[J]]:
        """Take all rows of a job at once, instead of `put` and `take`. Empty if the job has to be put, because it has
        many rows, or because other tenants wait or are expected.

        The tenant is not charged: no other tenant waits for a turn.
        """
        if self._jobs or job.rows > ARITHMETIC_ROWS or not self._discipline.is_alone(job):
            return []
        self._discipline.arrived(job)
        job.taken, job.left = job.rows, True
        return [Piece(job, 0, job.rows)]

    def next_deadline(self, now: float) -> float | None:
        """Time to call `expire` and `take` again if no job arrives before; None without such a time."""
        while self._deadlines and self._deadlines[0][2].left:
            heapq.heappop(self._deadlines)
        leader, again = self._discipline.next_leader(now)
        if leader is not None:
            return now
        times = [self._deadlines[0][0]] if self._deadlines else []
        times += [] if again is None else [again]
        return min(times, default=None)

    def done(self, pieces: Iterable[Piece[J]], *, now: float, seconds: float, matrices: int = 1) -> None:
        """Record that the pieces of a batch have been multiplied in `seconds`, with this number of matrices."""
        pieces = list(pieces)
        rows = sum([piece.rows for piece in pieces])
        work = sum([piece.rows * piece.job.row_work for piece in pieces])
        self.pace.record(pieces[0].job.key, rows=rows, work=work, seconds=seconds, matrices=matrices)
        self._discipline.multiplied(now)
        for piece in pieces:
            if piece.job.tenant not in self._jobs:
                self._discipline.departed(piece.job, now)

    def _leave(self, job: J) -> None:
        job.left = True
        self._jobs[job.tenant] -= 1
        if not self._jobs[job.tenant]:
            del self._jobs[job.tenant]
