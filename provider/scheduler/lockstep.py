"""`lockstep`: all tenants go through the model side by side. It is for comparison.

Nothing is multiplied while a tenant is away that was here within `lockstep_wait_s`; then everything that waits for one
layer group is. The next one is the first that somebody waits for in the order of a training step, forward and then
back, from where the last one was and around: whoever is ahead waits for those behind, and nobody begins a second pass
through the model before the others have ended their first.
"""

from __future__ import annotations

from collections.abc import Hashable

from provider.scheduler.discipline import Discipline, whole
from provider.scheduler.jobs import J, Key, Piece
from provider.scheduler.pace import Pace
from provider.scheduler.policy import Policy
from provider.scheduler.waiting import Waiting
from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.network import wire


class Lockstep(Discipline[J]):
    """See the module."""

    def __init__(self, policy: Policy, waiting: Waiting[J], pace: Pace) -> None:
        super().__init__(policy, waiting, pace)
        self._awaited: dict[Hashable, float] = {}  # who is away, and until when that is waited for
        self._at: tuple[bool, int, wire.Arithmetic] = (False, 0, "ring")  # where in a step the last product was

    def came(self, job: J) -> None:
        self._awaited.pop(job.tenant, None)

    def went(self, job: J, now: float) -> None:
        self._awaited[job.tenant] = now + self._policy.lockstep_wait_s

    def turn(self, now: float) -> tuple[J | None, float | None]:
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


def _place(key: Key) -> tuple[bool, int, wire.Arithmetic]:
    """Of a layer group in a training step: forward from the first, backward from the last."""
    group, direction, arithmetic = key
    return direction != FORWARD, group if direction == FORWARD else -group, arithmetic
