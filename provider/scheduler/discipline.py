"""The interface of a policy: it picks the next job and the rows of its product. `Discipline` itself is policy
`none`."""

from typing import Generic

from provider.scheduler.jobs import J, Piece
from provider.scheduler.pace import Pace
from provider.scheduler.policy import Policy
from provider.scheduler.waiting import RunnableJobs


class Discipline(Generic[J]):
    """Multiplies every job separately, in order of fair shares."""

    def __init__(self, policy: Policy, waiting: RunnableJobs[J], pace: Pace) -> None:
        self._policy = policy
        self._waiting = waiting
        self._pace = pace

    def arrived(self, job: J) -> None:
        """Called when a tenant without jobs sends a job."""

    def departed(self, job: J, now: float) -> None:
        """Called when the last job of a tenant has been multiplied."""

    def multiplied(self, now: float) -> None:
        """Called when a product has ended."""

    def is_alone(self, job: J) -> bool:
        """Returns True if no other tenant is expected while this job is multiplied. No job waits."""
        return False

    def next_leader(self, now: float) -> tuple[J | None, float | None]:
        """Return the job that leads the next product; or None, and the time to call again (None: after an event)."""
        return next((firsts[0] for _, firsts in self._waiting.in_turn()), None), None

    def batch(self, leader: J) -> list[Piece[J]]:
        """Return the pieces of a product that `leader` leads. Includes rows of `leader`; takes one slice at most."""
        return [Piece.next_of(leader, self._room(leader))]

    def _room(self, leader: J) -> int:
        return min(self._policy.max_batch_rows, self._pace.rows(leader))


def whole(jobs: list[J], room: int) -> list[Piece[J]]:
    """Pieces with all ready rows of a job, for the jobs that fit in `room` rows, in this order."""
    pieces = []
    for job in jobs:
        piece = Piece.next_of(job, job.rows)
        if piece.rows <= room:
            pieces.append(piece)
            room -= piece.rows
    return pieces
