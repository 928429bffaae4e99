"""`lockstep`: all tenants go through the model in step. This policy exists for comparison.

The scheduler waits until every tenant that was active within `lockstep_wait_s` has a request here. The scheduler then
multiplies all requests for one layer group. Layer groups follow in the order of a training step (forward, then
backward) and start again at the first one. A tenant that is ahead therefore waits for the tenants behind, and starts
its next pass through the model when the other tenants have finished theirs.
"""

from collections.abc import Hashable

from provider.scheduler.discipline import Discipline, whole
from provider.scheduler.jobs import J, Key, Piece
from provider.scheduler.pace import Pace
from provider.scheduler.policy import Policy
from provider.scheduler.waiting import RunnableJobs
from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.network import wire


class Lockstep(Discipline[J]):
    """The policy `lockstep`; see the module docstring."""

    def __init__(self, policy: Policy, waiting: RunnableJobs[J], pace: Pace) -> None:
        super().__init__(policy, waiting, pace)
        self._awaited: dict[Hashable, float] = {}  # absent tenants, and how long to wait for each
        self._at = _place(Key(0, FORWARD, "ring"))  # place of the last product in the step

    def arrived(self, job: J) -> None:
        self._awaited.pop(job.tenant, None)

    def departed(self, job: J, now: float) -> None:
        self._awaited[job.tenant] = now + self._policy.lockstep_wait_s

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
