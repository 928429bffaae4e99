"""How fast products run, learned from those that have run."""

from __future__ import annotations

from provider.scheduler.jobs import Job, Key
from symbiosis_priv import wire
from symbiosis_priv.ring import Direction

_FIRST_GUESS = 2e9  # multiply-adds a second, until a product has been timed
_TELLING_ROWS = 8  # fewer say little about what a row of many takes


class Pace:
    """A product takes the time in which its weights are read, and then some for every row.

    Few rows tell about the first, many about the second.

    Args:
        slice_s: what `rows` are meant to take.
    """

    def __init__(self, slice_s: float) -> None:
        self._slice_s = slice_s
        self._reads: dict[tuple[Direction, wire.Arithmetic], float] = {}  # seconds per weight
        self._rates: dict[tuple[Direction, wire.Arithmetic], float] = {}  # multiply-adds a second, the weights at hand

    def rows(self, job: Job) -> int:
        """Rows of the job's kind that take about one slice; never so few that nothing more is learned from them."""
        seconds = max(self._slice_s / 2, self._slice_s - self.reading(job))
        return max(_TELLING_ROWS, int(seconds * self._rate(job.key) / max(1, job.row_work)))

    def reading(self, job: Job) -> float:
        """Seconds that a product of the job's kind takes for any number of rows: what is saved by sharing one."""
        return self._read(job.key) * job.row_work

    def seconds(self, job: Job, rows: int) -> float:
        """What a product of so many rows of the job's kind takes."""
        return self.reading(job) + rows * job.row_work / self._rate(job.key) if rows else 0.0

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
