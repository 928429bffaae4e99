"""Memory for large matrices that is used again.

A large matrix made anew costs a page fault and a cleared page for every 4 KiB of it; a step of fine-tuning makes
hundreds of megabytes of them. A buffer comes back by itself when nothing refers to it any more, be it through a slice
or a view, so nothing can be overwritten that somebody still reads. What it holds is whatever was there before: one
`Buffers` serves one session or one connection, never two tenants.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SMALL = 1 << 18  # below that the C library keeps memory at hand itself
_STEPS = 8  # sizes between a power of two and the next


class Buffers:
    """Uninitialised memory, kept for the next who asks for as much. Safe under threads and in finalisers.

    Args:
        limit: bytes that may lie unused.
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._unused = 0
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self._lock = threading.RLock()  # a finaliser may run in the middle of `take`

    @property
    def unused(self) -> int:
        """Bytes that lie ready."""
        return self._unused

    def take(self, size: int) -> NDArray[np.uint8]:
        """`size` bytes; they come back when the array and everything made from it are gone."""
        if size < _SMALL:
            return np.empty(size, dtype=np.uint8)
        length = _rounded(size)
        with self._lock:
            block = self._free[length].pop() if self._free[length] else None
            self._unused -= length if block is not None else 0
        block = _fresh(length) if block is None else block
        array: NDArray[np.uint8] = np.frombuffer(block, dtype=np.uint8, count=size)
        weakref.finalize(array, self._give_back, block).atexit = False
        return array

    def matrix(self, rows: int, columns: int, *, dtype: torch.dtype = torch.int32) -> Tensor:
        """A contiguous CPU matrix `[rows, columns]` in such memory."""
        if rows * columns * dtype.itemsize < _SMALL:
            return torch.empty((rows, columns), dtype=dtype, device="cpu")
        return torch.from_numpy(self.take(rows * columns * dtype.itemsize)).view(dtype).view(rows, columns)

    def _give_back(self, block: mmap.mmap) -> None:
        with self._lock:
            if self._unused + len(block) <= self._limit:
                self._unused += len(block)
                self._free[len(block)].append(block)


def large_tensor(shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous CPU tensor, on large pages where the system has them; gone when nobody uses it.

    Args:
        dtype: one that numpy has.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    like = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    return torch.from_numpy(np.frombuffer(_fresh(size), dtype=like).reshape(shape))


def _rounded(size: int) -> int:
    """The next of eight sizes to every power of two: what differs by a few rows shares buffers."""
    step = 1 << max(size.bit_length() - 1, 0)
    step //= _STEPS
    return -(-size // step) * step


def _fresh(length: int) -> mmap.mmap:
    block = mmap.mmap(-1, length)
    with contextlib.suppress(OSError, AttributeError):  # where the system has large pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
