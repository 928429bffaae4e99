"""Measures the cost of a batch: what all tasks share, and the operators of each PEFT method."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenant.tasks.coordinated import Costs
from tenant.tasks.registry import Tasks

Run = Callable[[int, int], Any]


def measure_costs(
    tasks: Tasks,
    run: Run,
    examples: Mapping[str, str],
    *,
    rows: Sequence[int] = (1, 4, 16, 64),
    tokens: Sequence[int] = (4, 16, 64, 128),
    repeat: int = 3,
) -> Costs:
    """Measure batches of some sizes and interpolate between them.

    Args:
        run: computes the model on a batch; called with (rows, tokens).
        examples: the name of one task of each PEFT method, by method.
        rows: measured numbers of rows, ascending; the last one is the largest batch.
        tokens: measured lengths, ascending; the last one is the longest request.
        repeat: number of measurements of each size; the median is used.
    """
    shared = np.empty((len(rows), len(tokens)))
    own = {method: np.empty_like(shared) for method in examples}
    for i, count in enumerate(rows):
        shared[i] = _seconds(run, count, tokens, repeat)
        for method, name in examples.items():
            with tasks.batch([name] * count):
                own[method][i] = _seconds(run, count, tokens, repeat) - shared[i]
    return Costs(
        shared=_between(shared, rows, tokens),
        own={method: _between(np.maximum(table, 0), rows, tokens) for method, table in own.items()},
    )


def _seconds(run: Run, count: int, tokens: Sequence[int], repeat: int) -> list[float]:
    """Return the median seconds for each length."""
    run(count, tokens[0])  # the first pass of a batch makes its plan
    medians = []
    for length in tokens:
        ends = [time.perf_counter()]
        for _ in range(repeat):
            run(count, length)
            ends.append(time.perf_counter())
        medians.append(statistics.median(end - start for start, end in pairwise(ends)))
    return medians


def _between(table: NDArray[np.float64], rows: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float64]:
    """Interpolate linearly, first along tokens, then along rows. Below the smallest size the cost is constant."""
    along = np.stack([np.interp(np.arange(tokens[-1] + 1), tokens, line) for line in table])
    return np.stack([np.interp(np.arange(rows[-1] + 1), rows, column) for column in along.T], axis=1)
