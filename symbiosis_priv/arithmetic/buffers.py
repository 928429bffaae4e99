"""Reuses memory for large matrices.

A new large matrix costs a page fault and a cleared page for every 4 KiB; one step of fine-tuning makes hundreds of
megabytes of matrices. A buffer returns to the pool when no array, slice or view refers to it, so memory that is still
read is never overwritten. A buffer keeps its old contents: one `Buffers` serves one session or one connection, never
two tenants. Pages are private to the process, also after a fork.
"""

import contextlib
import math
import mmap
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SMALL = 1 << 18  # the C library pools smaller blocks itself
_STEPS = 8  # sizes between a power of two and the next


class Buffers:
    """A pool of uninitialised memory. Safe under threads and in finalisers. Beyond `limit` bytes of unused blocks, the
    block that was unused for longest is freed."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._unused = 0
        # by length; the block that was unused for longest comes first
        self._free: defaultdict[int, deque[mmap.mmap]] = defaultdict(deque)
        self._ages: OrderedDict[int, mmap.mmap] = OrderedDict()  # all blocks by identity, in the same order
        self._lock = threading.RLock()  # reentrant, because a finaliser may run in the middle of `take`

    @property
    def unused(self) -> int:
        return self._unused

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return an array of `size` bytes. Its memory returns to the pool when the array and all its views are gone."""
        if size < _SMALL:
            return np.empty(size, dtype=np.uint8)
        length = _rounded(size)
        block = self._take_unused(length) or _fresh(length)
        array: NDArray[np.uint8] = np.frombuffer(block, dtype=np.uint8, count=size)
        weakref.finalize(array, self._give_back, block).atexit = False
        return array

    def array(self, rows: int, columns: int, *, dtype: type[np.generic] = np.int32) -> NDArray[Any]:
        """Return a contiguous matrix `[rows, columns]` in memory of the pool. The dtype has 4 bytes."""
        size = rows * columns * 4
        if size < _SMALL:  # numpy allocates in a fifth of torch's time
            return np.empty((rows, columns), dtype=dtype)
        return self.take(size).view(dtype).reshape(rows, columns)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Return a contiguous int32 matrix `[rows, columns]` in memory of the pool."""
        return torch.from_numpy(self.array(rows, columns))

    def _take_unused(self, length: int) -> mmap.mmap | None:
        with self._lock:
            if not self._free[length]:
                return None
            block = self._free[length].pop()
            del self._ages[id(block)]
            self._unused -= length
            return block

    def _give_back(self, block: mmap.mmap) -> None:
        if len(block) > self._limit:
            return
        with self._lock:
            self._free[len(block)].append(block)
            self._ages[id(block)] = block
            self._unused += len(block)
            while self._unused > self._limit:
                _, oldest = self._ages.popitem(last=False)
                self._free[len(oldest)].popleft()
                self._unused -= len(oldest)


def large_tensor(shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous CPU tensor outside the pool, on huge pages if the system has them. numpy must have
    the dtype."""
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    like = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    return torch.from_numpy(np.frombuffer(_fresh(size), dtype=like).reshape(shape))


def _rounded(size: int) -> int:
    """Round up to one of eight sizes per power of two, so that matrices of similar row counts share buffers."""
    step = 1 << max(size.bit_length() - 1, 0)
    step //= _STEPS
    return -(-size // step) * step


def _fresh(length: int) -> mmap.mmap:
    # private, because shared mappings would be written by both sides of a fork, and never use large pages
    block = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # where the system has large pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
