"""Predicts the duration of products from the durations of earlier products."""

from provider.scheduler.jobs import Job, Key
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.network import wire

_Kind = tuple[Direction, wire.Arithmetic, bool]
"""The kind of a product: a key without its layer group."""
_FIRST_GUESS = 2e9  # multiply-adds a second, before the first product was timed
TELLING_ROWS = 8  # a product of fewer rows shows the time to read the weights, not the time of a row


class Pace:
    """A model of the duration of products.

    A product takes as long as reading its weights or as the arithmetic of its rows, whichever is longer, because
    reading and arithmetic overlap. Products of few rows show the time of reading, products of many rows the time of the
    arithmetic. Rows for experts need the weights of every expert among them: a product with one row for each expert
    reads all experts.

    Each layer group is measured separately: a product of a narrow group takes far longer per multiply-add than one of a
    wide group. With one estimate for all groups, a tenant that asks for the narrowest group makes the products of other
    tenants look slow, and its own products free. A group that was not measured is as fast as the fastest known one.

    Args:
        slice_s: the longest time that a product should take.
    """

    def __init__(self, slice_s: float) -> None:
        self._slice_s = slice_s
        self._reads: dict[Key, float] = {}  # seconds per weight
        self._rates: dict[Key, float] = {}  # multiply-adds a second
        self._least_reads: dict[_Kind, float] = {}
        self._best_rates: dict[_Kind, float] = {}

    def rows(self, job: Job) -> int:
        """Number of rows with the job's key that take about one slice; at least 8, so that the model keeps learning."""
        rows = self.rows_in(job, self._slice_s)
        if reading := _matrices_of_row(job) * self._read(job.key) * job.row_work:
            rows = min(rows, int(self._slice_s / reading))
        return max(TELLING_ROWS, rows)

    def rows_in(self, job: Job, seconds: float) -> int:
        """Number of rows with the job's key whose arithmetic takes `seconds`."""
        return int(seconds * self._rate(job.key) / max(1, job.row_work))

    def seconds(self, job: Job, rows: int) -> float:
        """Expected duration of a product of `rows` rows with the job's key."""
        matrices = max(1.0, rows * _matrices_of_row(job))
        return max(matrices * self._read(job.key), rows / self._rate(job.key)) * job.row_work

    def record(self, key: Key, *, rows: int, work: int, seconds: float, matrices: int = 1) -> None:
        """Learn that a product of `work` multiply-adds with `matrices` matrices took `seconds`. One outlier changes an
        estimate by at most 2x."""
        if not work:
            return
        kind, per_weight, rate = key[1:], seconds * rows / work / matrices, work / max(seconds, 1e-9)
        if rows < TELLING_ROWS * matrices:
            self._reads[key] = read = _nearer(self._read(key) or per_weight, per_weight)
            self._least_reads[kind] = min(self._least_reads.get(kind, read), read)
        if rows < TELLING_ROWS * matrices or per_weight < self._read(key):  # reading hid the arithmetic
            self._rates[key] = max(self._rate(key), rate)
        else:
            self._rates[key] = _nearer(self._rate(key), rate)
        self._best_rates[kind] = max(self._best_rates.get(kind, _FIRST_GUESS), self._rates[key])

    def _read(self, key: Key) -> float:
        return self._reads.get(key, self._least_reads.get(key[1:], 0.0))

    def _rate(self, key: Key) -> float:
        return self._rates.get(key, self._best_rates.get(key[1:], _FIRST_GUESS))


def _matrices_of_row(job: Job) -> float:
    """Matrices that each further row adds to a product of the job's rows."""
    return job.matrices / job.rows if job.key.by_expert else 0.0


def _nearer(old: float, measured: float) -> float:
    """The mean of both values, limited to a factor of 2 from `old`."""
    return min(max((old + measured) / 2, old / 2), 2 * old)
