"""What a policy decides: whose turn it is, and which rows make a product; and the simplest of them, `none`."""

from __future__ import annotations

from typing import Generic

from provider.scheduler.jobs import J, Piece
from provider.scheduler.pace import Pace
from provider.scheduler.policy import Policy
from provider.scheduler.waiting import Waiting


class Discipline(Generic[J]):
    """Every job alone, in turn.

    Args:
        policy: its figures.
        waiting: the jobs that could be taken.
        pace: how long products take.
    """

    def __init__(self, policy: Policy, waiting: Waiting[J], pace: Pace) -> None:
        self._policy = policy
        self._waiting = waiting
        self._pace = pace

    def came(self, job: J) -> None:
        """A tenant that had nothing here asks for something."""

    def went(self, job: J, now: float) -> None:
        """A tenant has nothing here any more: this job was its last."""

    def multiplied(self, now: float) -> None:
        """A product has ended."""

    def turn(self, now: float) -> tuple[J | None, float | None]:
        """Whose turn it is now; or nobody's, and when to look again."""
        return next((firsts[0] for _, firsts in self._waiting.in_turn()), None), None

    def batch(self, leader: J) -> list[Piece[J]]:
        """The rows of a product at this job's turn, some of its own among them; no more than take one slice."""
        return [Piece.next_of(leader, self._room(leader))]

    def _room(self, leader: J) -> int:
        return min(self._policy.max_batch_rows, self._pace.rows(leader))


def whole(jobs: list[J], room: int) -> list[Piece[J]]:
    """All that is ready of each of the jobs that fit in, in this order; not a part of any."""
    pieces = []
    for job in jobs:
        piece = Piece.next_of(job, job.rows)
        if piece.rows <= room:
            pieces.append(piece)
            room -= piece.rows
    return pieces
