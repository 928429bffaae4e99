"""How fast products run, learned from those that have run."""

from __future__ import annotations

from provider.scheduler.jobs import Job, Key
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.network import wire

_FIRST_GUESS = 2e9  # multiply-adds a second, until a product has been timed
_TELLING_ROWS = 8  # fewer say little about what a row of many takes


class Pace:
    """A product takes the time in which its weights are read or that of its rows' arithmetic, whichever is longer:
    while some weights are multiplied, the next ones are on their way.

    Few rows tell about the first, many about the second.

    Args:
        slice_s: what `rows` are meant to take.
    """

    def __init__(self, slice_s: float) -> None:
        self._slice_s = slice_s
        self._reads: dict[tuple[Direction, wire.Arithmetic], float] = {}  # seconds per weight
        self._rates: dict[tuple[Direction, wire.Arithmetic], float] = {}  # multiply-adds a second

    def rows(self, job: Job) -> int:
        """Rows of the job's kind that take about one slice; never so few that nothing more is learned from them."""
        return max(_TELLING_ROWS, self.rows_in(job, self._slice_s))

    def rows_in(self, job: Job, seconds: float) -> int:
        """Rows of the job's kind whose arithmetic takes so long."""
        return int(seconds * self._rate(job.key) / max(1, job.row_work))

    def seconds(self, job: Job, rows: int) -> float:
        """What a product of so many rows of the job's kind takes."""
        return max(self._read(job.key), rows / self._rate(job.key)) * job.row_work

    def record(self, key: Key, *, rows: int, work: int, seconds: float) -> None:
        """A product of `work` multiply-adds took `seconds`. One outlier moves the estimate by a factor of 2 at most."""
        if not work:
            return
        kind, per_weight, rate = key[1:], seconds * rows / work, work / max(seconds, 1e-9)
        if rows < _TELLING_ROWS:
            self._reads[kind] = _nearer(self._read(key) or per_weight, per_weight)
        if rows < _TELLING_ROWS or per_weight < self._read(key):  # it took no longer than fewer rows would have
            self._rates[kind] = max(self._rate(key), rate)
        else:
            self._rates[kind] = _nearer(self._rate(key), rate)

    def _read(self, key: Key) -> float:
        return self._reads.get(key[1:], 0.0)

    def _rate(self, key: Key) -> float:
        return self._rates.get(key[1:], _FIRST_GUESS)


def _nearer(old: float, measured: float) -> float:
    """Halfway, and by a factor of 2 at most."""
    return min(max((old + measured) / 2, old / 2), 2 * old)
