"""Rows sorted by expert, and the number of rows of each expert of a stack.

`counts` has one number per expert. The rows of expert k begin at row `counts[0] + ... + counts[k - 1]`.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from symbiosis_priv.errors import RangeError

Counts = tuple[int, ...]


def segments(counts: Counts) -> Iterator[tuple[int, slice]]:
    """The experts that get rows, each with its range of rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def clip(counts: Counts, first: int, rows: int) -> Counts:
    """The number of rows of each expert among the rows `first` to `first + rows - 1`."""
    found, start = [], 0
    for count in counts:
        found.append(max(0, min(start + count, first + rows) - max(start, first)))
        start += count
    return tuple(found)


def pick(counts: Counts, numbers: Sequence[int]) -> Counts:
    """The number of rows of each expert among the rows with these ascending numbers."""
    experts = np.searchsorted(np.cumsum(counts), numbers, side="right")
    return tuple(np.bincount(experts, minlength=len(counts)).tolist())


def merge(parts: Sequence[Counts]) -> tuple[Counts, Tensor]:
    """Sort the rows of several requests, one after the other, by expert. Returns the counts of all rows, and the order
    int64 `[r]` that sorts them: `rows[order]`."""
    table = np.array(parts, dtype=np.int64)
    experts = np.repeat(np.tile(np.arange(table.shape[1]), len(parts)), table.reshape(-1))
    return tuple(table.sum(axis=0).tolist()), torch.from_numpy(np.argsort(experts, kind="stable"))


def check_counts(counts: Counts, *, experts: int, rows: int) -> None:
    """Raise `RangeError` unless there is one count per expert and they add up to `rows`."""
    if len(counts) != experts:
        raise RangeError(f"{len(counts)} counts for {experts} experts")
    if min(counts) < 0 or sum(counts) != rows:
        raise RangeError(f"the counts of the experts add up to {sum(counts)}, not to {rows} rows")
