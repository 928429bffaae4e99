"""Coordinated batching: divides queued requests of many tasks into batches (PetS, section 4).

A batch is padded to its longest request, so long and short requests together waste work. A batch of few requests wastes
the time that every batch costs. Two dynamic programs minimise the cost (`measure_costs`): the first divides the
requests of each task into mini-batches, by the cost of the task's own operators; the second divides the mini-batches of
all tasks into batches, by the cost of the shared products. For comparison, `fixed` uses no cost.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from symbiosis_priv.errors import TaskError
from tenant.tasks.registry import Tasks


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A request for one row: token ids int64 `[tokens]`, a task, and its PEFT method as in `Costs.own`."""

    task: str
    method: str
    input_ids: Tensor

    @property
    def tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class Costs:
    """Seconds of a batch by its number of rows and its padded length; index 0 of each dimension is unused. `shared`:
    float64 `[rows + 1, tokens + 1]`, the cost of what all tasks share. `own`: float64 arrays of the same shape by
    method, the cost of one task's operators."""

    shared: NDArray[np.float64]
    own: dict[str, NDArray[np.float64]]

    @property
    def max_rows(self) -> int:
        return len(self.shared) - 1

    @property
    def max_tokens(self) -> int:
        return len(self.shared[0]) - 1


Batches = list[list[Request]]


def fixed(requests: Sequence[Request], *, size: int) -> Batches:
    """Divide requests into batches of `size` rows, in the order of arrival."""
    return [list(requests[start : start + size]) for start in range(0, len(requests), size)]


def by_task(requests: Sequence[Request], costs: Costs) -> Batches:
    """Divide the requests of each task into batches, by the cost of the task's own operators."""
    _check(requests, costs)
    of_task: dict[str, list[Request]] = defaultdict(list)
    for request in sorted(requests, key=lambda request: request.tokens):
        of_task[request.task].append(request)
    found: Batches = []
    for mine in of_task.values():
        found += [mine[cut] for cut in _cuts([1] * len(mine), [r.tokens for r in mine], costs.own[mine[0].method])]
    return found


def coordinated(requests: Sequence[Request], costs: Costs) -> Batches:
    """Divide requests into batches of at most `costs.max_rows` rows by both costs. Raises `TaskError` if a request is
    longer than the measured costs, or its method was not measured."""
    return joined(by_task(requests, costs), costs)


def padded(batch: Sequence[Request]) -> tuple[Tensor, Tensor]:
    """Return `input_ids` and `attention_mask`, both int64 `[rows, tokens]`, padded on the right."""
    ids = torch.nn.utils.rnn.pad_sequence([r.input_ids for r in batch], batch_first=True)
    lengths = torch.tensor([r.tokens for r in batch], dtype=torch.long, device="cpu")
    return ids, (torch.arange(ids.shape[1], dtype=torch.long, device="cpu") < lengths[:, None]).long()


def joined(minis: Batches, costs: Costs) -> Batches:
    """Join mini-batches to batches, by the cost of the shared products."""
    _check([request for mini in minis for request in mini], costs)
    minis = sorted(minis, key=lambda mini: mini[-1].tokens)
    cuts = _cuts([len(mini) for mini in minis], [mini[-1].tokens for mini in minis], costs.shared)
    return [[request for mini in minis[cut] for request in mini] for cut in cuts]


def _cuts(rows: Sequence[int], tokens: Sequence[int], cost: NDArray[np.float64]) -> list[slice]:
    """Divide a list into consecutive parts with the smallest sum of `cost[rows of the part, its last tokens]`.

    `best[j]` is the smallest cost of the first j entries, and the last part of that division begins at `start[j]`.
    """
    ends = np.concatenate([[0], np.cumsum(rows)])
    best, start = [0.0], [0]
    for j in range(1, len(rows) + 1):
        # a part that begins earlier would have too many rows
        first = int(np.searchsorted(ends, ends[j] - (cost.shape[0] - 1)))
        sums = np.asarray(best[first:j]) + cost[ends[j] - ends[first:j], tokens[j - 1]]
        at = int(np.argmin(sums))
        best.append(float(sums[at]))
        start.append(first + at)
    found, end = [], len(rows)
    while end:
        found.append(slice(start[end], end))
        end = start[end]
    return found[::-1]


def _check(requests: Sequence[Request], costs: Costs) -> None:
    for request in requests:
        if not 0 < request.tokens <= costs.max_tokens:
            raise TaskError(
                f"a request of {request.tokens} tokens is outside the measured costs (1 to {costs.max_tokens}); "
                f"measure with more tokens"
            )
        if request.method not in costs.own:
            raise TaskError(f"the costs of the method {request.method} were not measured; measure with a task of it")


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
