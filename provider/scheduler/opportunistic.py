"""`opportunistic`: whoever waits for the same layer group shares a product, and company is waited for where it pays.

* **Choice.** Tenants go through a model in the same order, so that those who are passed over meet those who come behind
  them, and share all products from there on. A stage's turn therefore goes to those who are farthest ahead of whoever
  follows them (the followers close up meanwhile), and of these to the largest company. It costs nobody anything: the
  executor has other work. Nobody leads who has had `max_wait_s` more than the one whose turn it is, and nobody is
  passed over for longer than a slice.
* **Waiting.** With nothing else to do, waiting costs all who wait, and company saves what two products take longer than
  one: the time in which the weights are read once more, until rows are so many that their arithmetic takes as long. So
  they wait until together they have lost as much as that; none of them for longer than `wait_share` of its own
  product's time (a large request has more patience than a small one) nor than `max_wait_s`; and only while somebody is
  expected in time who will ask for the same layer group (`Absent`). A tenant alone never waits.
* **Riders.** Rows ride where the weights are read anyway: inference, whole, with whatever goes; of fine-tuning what
  is at most a slice from its turn, cut to what is left. When fine-tuning leads, half of the slice is its own. When it
  is inference's turn, fine-tuning makes the product take half as long again at most: a flood of large requests for the
  same layer group would otherwise make every row of inference wait for a slice.
* **Inference beside fine-tuning.** When it is inference's turn, fine-tuning is held back for `max_wait_s` at most for a
  tenant that is about to ask for its next layer group, or that waits for company: one row would wait many times longer
  for the slice than the slice for the row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from provider.scheduler.absent import Absent, Expected
from provider.scheduler.discipline import Discipline, whole
from provider.scheduler.jobs import J, Key, Piece, Stage
from provider.scheduler.pace import Pace
from provider.scheduler.policy import Policy
from provider.scheduler.waiting import Waiting

_HINDRANCE = 0.5  # of its own time: what inference may be slowed down by when it is its turn
_RECENT_WAITS = 10  # a tenant is expected back for so many times the longest wait
_SIGHT = 8  # layer groups: whoever is farther behind is not waited for


class Opportunistic(Discipline[J]):
    """See the module."""

    def __init__(self, policy: Policy, waiting: Waiting[J], pace: Pace) -> None:
        super().__init__(policy, waiting, pace)
        self._absent = Absent(_RECENT_WAITS * policy.max_wait_s)
        self._free = 0.0  # since when nothing is multiplied

    def came(self, job: J) -> None:
        self._absent.come(job.tenant, job.stage, job.key, job.arrival)

    def went(self, job: J, now: float) -> None:
        self._absent.leave(job.tenant, job.stage, job.key, now)

    def multiplied(self, now: float) -> None:
        self._free = now

    def turn(self, now: float) -> tuple[J | None, float | None]:
        waiting: list[float] = []
        if not self._waiting:
            return None, None
        expected = self._absent.expected(now, now + self._policy.max_wait_s)
        for stage, firsts in self._waiting.in_turn():
            times = self._go_times(stage, firsts, now, expected)
            may_go = [job for job, time in zip(firsts, times, strict=True) if time <= now]
            if may_go:
                return self._choice(stage, firsts, may_go, now), None
            waiting += times
            if stage == "inference":
                break  # fine-tuning could keep it waiting for far longer than it waits for company
        return None, min(waiting, default=None)

    def _go_times(
        self, stage: Stage, firsts: Sequence[J], now: float, expected: Mapping[tuple[Stage, Key], Expected]
    ) -> list[float]:
        """When each of a stage's jobs need not wait any more, for company or for inference."""
        held_back = now
        if stage == "fine_tuning" and self._waiting.inference_is_due():
            limit = self._free + self._policy.max_wait_s
            coming = [e for (whose, _), e in expected.items() if whose == "inference" and e.first <= limit]
            held_back = max([now, *(min(limit, e.until) for e in coming)])
        times = []
        worth: dict[tuple[Key, int], float] = {}  # most jobs are like the next one
        for job in firsts:
            time = job.offered = min(job.offered, now)
            company = expected.get((stage, job.key))
            if company is not None and not job.taken:
                like = job.key, job.rows
                if like not in worth:
                    worth[like] = self._worth(job)
                limit = job.offered + worth[like]
                if company.first <= limit:
                    time = min(limit, company.until)
            times.append(max(time, held_back))
        return times

    def _worth(self, job: J) -> float:
        """How long company is worth waiting for."""
        seconds = self._pace.seconds
        rows = sum(other.ready - other.taken for other in self._waiting.of_key(job.key))
        saved = seconds(job, rows) + seconds(job, job.rows) - seconds(job, rows + job.rows)
        patience = self._policy.wait_share * seconds(job, job.rows)
        return min(saved / self._company(job.key), patience, self._policy.max_wait_s)

    def _company(self, key: Key) -> int:
        """Tenants who wait for a layer group."""
        return len({job.tenant for job in self._waiting.of_key(key)})

    def _choice(self, stage: Stage, firsts: Sequence[J], may_go: Sequence[J], now: float) -> J:
        """Whose product it is: of those who may go, in turn, and with whoever rides along."""
        if len(may_go) == 1:
            return may_go[0]
        most = self._waiting.charged(may_go[0]) + self._policy.max_wait_s
        near = [job for job in may_go if self._waiting.charged(job) <= most]
        longest = min(near, key=lambda job: job.offered)
        if now - longest.offered >= self._policy.slice_s:
            return longest
        heads: dict[Key, J] = {}  # of each layer group the first one in turn
        for job in near:
            heads.setdefault(job.key, job)
        if len(heads) == 1:
            return near[0]
        leads = self._leads(stage, {job.key for job in firsts})
        return max(heads.values(), key=lambda job: (leads[job.key], self._company(job.key)))

    def _leads(self, stage: Stage, keys: Collection[Key]) -> dict[Key, int]:
        """By how many layer groups those who wait for one are ahead of the next ones behind them."""
        leads = dict.fromkeys(keys, _SIGHT)
        for behind in keys:
            for steps, ahead in zip(range(1, _SIGHT), self._absent.after(stage, behind), strict=False):
                if ahead in leads:
                    leads[ahead] = min(leads[ahead], steps)
                    break
        return leads

    def batch(self, leader: J) -> list[Piece[J]]:
        room = self._room(leader)
        others = [job for job in self._waiting.of_key(leader.key) if job is not leader]
        if not others:
            return [Piece.next_of(leader, room)]
        others.sort(key=lambda job: (self._waiting.charged(job), job.arrival))
        inference = [job for job in others if job.stage == "inference"]
        fine_tuning = [job for job in others if job.stage == "fine_tuning"]
        if leader.stage == "inference":
            first = Piece.next_of(leader, room)
            pieces = [first, *whole(inference, room - first.rows)]
            filling = [job for job in fine_tuning if self._near_its_turn(job)]
            if self._waiting.inference_is_due():
                rows = sum(piece.rows for piece in pieces)  # a kernel has its rate with many: no rider is free
                room = min(room, rows + self._pace.rows_in(leader, _HINDRANCE * self._pace.seconds(leader, rows)))
        else:
            pieces = whole(inference, room - Piece.next_of(leader, max(1, room // 2)).rows)
            filling = [leader, *fine_tuning]
        return pieces + _filling(filling, room - sum(piece.rows for piece in pieces))

    def _near_its_turn(self, job: J) -> bool:
        """Its tenant has had at most a slice more than whoever of its stage is next."""
        return self._waiting.charged(job) <= self._waiting.least_charged(job.stage) + self._policy.slice_s


def _filling(jobs: list[J], room: int) -> list[Piece[J]]:
    """As many rows as there is room for, in this order: the last job is cut."""
    pieces = []
    for job in jobs:
        piece = Piece.next_of(job, room)
        if piece.rows:
            pieces.append(piece)
            room -= piece.rows
    return pieces
