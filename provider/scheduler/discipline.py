"""The interface of a policy, which picks the next job and the rows of its product; and two policies for comparison.

`none` (`Discipline` itself) multiplies every job separately. With `lockstep`, all tenants go through the model in step:
the scheduler waits until every tenant that was active within `lockstep_wait_ms` has a request here, and multiplies all
requests for one layer group. Layer groups follow in the order of a training step (forward, then backward) and start
again at the first one. A tenant that is ahead therefore waits for the tenants behind, and starts its next pass through
the model when the other tenants have finished theirs.
"""

from collections.abc import Hashable
from typing import Generic

from provider.config.schema import SchedulerConfig
from provider.scheduler.jobs import J, Key, Pace, Piece, RunnableJobs
from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.network import wire


class Discipline(Generic[J]):
    """Multiplies every job separately, in order of fair shares."""

    def __init__(self, config: SchedulerConfig, waiting: RunnableJobs[J], pace: Pace) -> None:
        self._config = config
        self._slice_s, self._max_wait_s = config.slice_s, config.max_wait_s
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
        return min(self._config.max_batch_rows, self._pace.rows(leader))


def whole(jobs: list[J], room: int) -> list[Piece[J]]:
    """Pieces with all ready rows of a job, for the jobs that fit in `room` rows, in this order."""
    pieces = []
    for job in jobs:
        piece = Piece.next_of(job, job.rows)
        if piece.rows <= room:
            pieces.append(piece)
            room -= piece.rows
    return pieces


class Lockstep(Discipline[J]):
    """The policy `lockstep`; see the module docstring."""

    def __init__(self, config: SchedulerConfig, waiting: RunnableJobs[J], pace: Pace) -> None:
        super().__init__(config, waiting, pace)
        self._awaited: dict[Hashable, float] = {}  # absent tenants, and how long to wait for each
        self._at = _place(Key(0, FORWARD, "ring"))  # place of the last product in the step

    def arrived(self, job: J) -> None:
        self._awaited.pop(job.tenant, None)

    def departed(self, job: J, now: float) -> None:
        self._awaited[job.tenant] = now + self._config.lockstep_wait_ms / 1000

    def next_leader(self, now: float) -> tuple[J | None, float | None]:
        self._awaited = {tenant: until for tenant, until in self._awaited.items() if until > now}
        keys = sorted(self._waiting.keys(), key=lambda key: (_place(key) < self._at, _place(key)))
        if not keys:
            return None, None
        leader = self._waiting.of_key(keys[0])[0]
        if self._awaited and not leader.taken:
            return None, max(self._awaited.values())
        return leader, None

    def batch(self, leader: J) -> list[Piece[J]]:
        self._at = _place(leader.key)
        room = self._room(leader)
        first = Piece.next_of(leader, room)
        others = [job for job in self._waiting.of_key(leader.key) if job is not leader]
        return [first, *whole(others, room - first.rows)]


def _place(key: Key) -> tuple[bool, int, wire.Arithmetic, bool]:
    """Position of a layer group in a training step: forward from the first group, then backward from the last."""
    forward = key.direction == FORWARD
    return not forward, key.group if forward else -key.group, key.arithmetic, key.by_expert
