"""Matrices that stand side by side, as the compiled passes take them, and rows in shares for several threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from symbiosis_priv.native import pointer
from symbiosis_priv.parallel import for_each_slice

FORMATS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}  # as in passes.h
_SHARE = 1 << 18  # entries that are worth a thread of their own


class Parts:
    """Float matrices `[r, w_k]` on the CPU, of one dtype in `FORMATS`, rows in one piece each. Keeps them alive."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._matrices = matrices
        numbers, self._addresses = _arrays(len(matrices))
        strides, widths = numbers(*[m.stride(0) for m in matrices]), numbers(*[m.shape[1] for m in matrices])
        self._layout = strides, widths, len(matrices), FORMATS[matrices[0].dtype]

    @classmethod
    def to_read(cls, matrices: Sequence[Tensor]) -> Parts:
        """Any float matrices; copied if they must be. float16 is exact in float32."""
        return cls([_readable(m) for m in matrices])

    def arguments(self, row: int) -> tuple[object, ...]:
        """The C arguments for the rows from this one on: addresses, strides, widths, count, format."""
        return (self._addresses(*[pointer(m, row) for m in self._matrices]), *self._layout)


@functools.cache
def _arrays(count: int) -> tuple[type[ctypes.Array[ctypes.c_int64]], type[ctypes.Array[ctypes.c_void_p]]]:
    return ctypes.c_int64 * count, ctypes.c_void_p * count


def has_rows_in_one_piece(matrix: Tensor) -> bool:
    """Whether the compiled code can read and write it where it is."""
    return matrix.stride(1) == 1 or matrix.shape[1] <= 1


def _readable(matrix: Tensor) -> Tensor:
    matrix = matrix.detach()
    matrix = matrix if matrix.dtype in FORMATS else matrix.to(torch.float32)
    return matrix if has_rows_in_one_piece(matrix) else matrix.contiguous()


def all_rows(work: Callable[[int, int], bool], rows: int, width: int) -> bool:
    """Whether `work(start, stop)` holds for all rows; on as many threads as torch may use if there is enough to do."""
    least = max(1, _SHARE // max(1, width))
    if rows <= least:
        return work(0, rows)
    failed: list[int] = []

    def checked(start: int, stop: int) -> None:
        if not work(start, stop):
            failed.append(start)

    for_each_slice(checked, total=rows, least=least)
    return not failed
