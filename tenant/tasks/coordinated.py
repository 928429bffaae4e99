"""Coordinated batching: divides queued requests of many tasks into batches (PetS, section 4).

A batch is padded to its longest request, so long and short requests together waste work. A batch of few requests wastes
the time that every batch costs. A dynamic program over the requests, sorted by length, finds the division with the
smallest cost (`measure_costs`): that of the shared products, and that of each PEFT method's operators. PetS has two
programs, one for each cost; docs/tasks.md says why here is one.
"""

import timeit
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
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
    method, the cost of the operators of its rows."""

    shared: NDArray[np.float64]
    own: dict[str, NDArray[np.float64]]

    @property
    def max_rows(self) -> int:
        return len(self.shared) - 1


Batches = list[list[Request]]


def fixed(requests: Sequence[Request], *, size: int) -> Batches:
    """Divide requests into batches of `size` rows, in the order of arrival."""
    return [list(requests[start : start + size]) for start in range(0, len(requests), size)]


def coordinated(requests: Sequence[Request], costs: Costs) -> Batches:
    """Divide requests into batches of at most `costs.max_rows` rows: by both costs, or by size, where that costs less.
    Raises `TaskError` if a request is longer than the measured costs, or its method was not measured."""
    longest = len(costs.shared[0]) - 1
    for request in requests:
        if not 0 < request.tokens <= longest:
            raise TaskError(
                f"a request of {request.tokens} tokens is outside the measured costs (1 to {longest}); measure with "
                f"more tokens"
            )
        if request.method not in costs.own:
            raise TaskError(f"the costs of the method {request.method} were not measured; measure with a task of it")
    candidates = divided(requests, costs), fixed(requests, size=costs.max_rows)
    return min(candidates, key=lambda batches: predicted(batches, costs))


def predicted(batches: Batches, costs: Costs) -> float:
    """Return the seconds that batches take according to `costs`."""
    seconds = 0.0
    for batch in batches:
        tokens = max(request.tokens for request in batch)
        own = Counter(request.method for request in batch).items()
        seconds += costs.shared[len(batch), tokens] + sum(costs.own[method][rows, tokens] for method, rows in own)
    return float(seconds)


def divided(requests: Sequence[Request], costs: Costs) -> Batches:
    """Divide requests, sorted by length, into consecutive batches with the smallest predicted cost.

    `best[j]` is the smallest cost of the first j requests, and the last batch of that division begins at `start[j]`.
    """
    ordered = sorted(requests, key=lambda request: request.tokens)
    # the number of requests of each method among the first j
    counts = {m: np.cumsum([0, *(request.method == m for request in ordered)]) for m in {r.method for r in ordered}}
    best, start = [0.0], [0]
    for j, request in enumerate(ordered, start=1):
        first = max(0, j - costs.max_rows)
        sums = np.asarray(best[first:j]) + costs.shared[j - np.arange(first, j), request.tokens]
        for method, count in counts.items():
            rows = count[j] - count[first:j]
            sums += np.where(rows > 0, costs.own[method][rows, request.tokens], 0)
        at = int(np.argmin(sums))
        best.append(float(sums[at]))
        start.append(first + at)
    found, end = [], len(ordered)
    while end:
        found.append(ordered[start[end] : end])
        end = start[end]
    return found[::-1]


def padded(batch: Sequence[Request]) -> tuple[Tensor, Tensor]:
    """Return `input_ids` and `attention_mask`, both int64 `[rows, tokens]`, padded on the right."""
    ids = torch.nn.utils.rnn.pad_sequence([r.input_ids for r in batch], batch_first=True)
    lengths = torch.tensor([r.tokens for r in batch], dtype=torch.long, device="cpu")
    return ids, (torch.arange(ids.shape[1], dtype=torch.long, device="cpu") < lengths[:, None]).long()


def measure_costs(
    tasks: Tasks,
    run: Callable[[int, int], Any],
    names: Sequence[str],
    *,
    rows: Sequence[int] = (1, 4, 16, 64),
    tokens: Sequence[int] = (4, 16, 64, 128),
    repeat: int = 3,
) -> Costs:
    """Measure batches of some sizes and interpolate between them.

    Args:
        run: computes the model on a batch; called with (rows, tokens).
        names: tasks of each PEFT method. Name as many as a batch mixes, because some methods take longer for many.
        rows: measured numbers of rows, ascending; the last one is the largest batch.
        tokens: measured lengths, ascending; the last one is the longest request.
        repeat: number of measurements of each size; the smallest is used.
    """
    of_method: dict[str, list[str]] = {}
    for name in names:
        of_method.setdefault(tasks[name].method, []).append(name)
    shared = np.empty((len(rows), len(tokens)))
    own = {method: np.empty_like(shared) for method in of_method}

    def seconds(count: int) -> list[float]:
        """The smallest for each length, because other work on the machine only adds time."""
        run(count, tokens[0])  # the first pass of a batch makes its plan
        return [min(timeit.repeat(partial(run, count, length), number=1, repeat=repeat)) for length in tokens]

    for i, count in enumerate(rows):
        shared[i] = seconds(count)
        for method, mine in of_method.items():
            with tasks.batch(list(islice(cycle(mine), count))):
                own[method][i] = np.maximum(seconds(count) - shared[i], 0)

    def between(table: NDArray[np.float64]) -> NDArray[np.float64]:
        """Interpolate linearly, first along tokens, then along rows. Below the smallest size the cost is constant."""
        along = np.stack([np.interp(np.arange(tokens[-1] + 1), tokens, line) for line in table])
        return np.stack([np.interp(np.arange(rows[-1] + 1), rows, column) for column in along.T], axis=1)

    return Costs(shared=between(shared), own={method: between(table) for method, table in own.items()})
