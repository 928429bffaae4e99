"""Describes column blocks of a matrix to the compiled passes, and divides rows between threads."""

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from symbiosis_priv.native.parallel import for_each_slice

FORMATS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}  # as in passes.h
_NO_MEMORY = -1  # as in passes.h
_SHARE = 1 << 18  # entries: fewer are not worth another thread


def layout(matrices: Sequence[Tensor]) -> ctypes.Array[ctypes.c_int64]:
    """The C struct `parts` of passes.h for float matrices `[r, w_k]`: column blocks on the CPU, one dtype of `FORMATS`.

    Each row of a matrix must be contiguous. The caller keeps the matrices alive.
    """
    count = len(matrices)
    fields = [FORMATS[matrices[0].dtype], count]
    for matrix in matrices:
        fields += matrix.data_ptr(), matrix.stride(0), matrix.shape[1]
    return _fields(2 + 3 * count)(*fields)


def addresses(matrices: Sequence[Tensor]) -> ctypes.Array[ctypes.c_int64]:
    """The addresses of matrices. The caller keeps the matrices alive."""
    return _fields(len(matrices))(*[matrix.data_ptr() for matrix in matrices])


def readable(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Float matrices that the compiled code can read. A matrix is copied if necessary; float16 is converted to
    float32."""
    return [matrix if matrix.dtype in FORMATS and matrix.stride(1) == 1 else _copied(matrix) for matrix in matrices]


@functools.cache
def _fields(count: int) -> type[ctypes.Array[ctypes.c_int64]]:
    return ctypes.c_int64 * count


def _copied(matrix: Tensor) -> Tensor:
    matrix = matrix.detach()
    matrix = matrix if matrix.dtype in FORMATS else matrix.to(torch.float32)
    return matrix.contiguous()


def all_rows(work: Callable[..., int], *arguments: object, rows: int, width: int) -> bool:
    """Run a function of the library over all rows, on several threads if there are many. Returns True if all succeed.

    Args:
        work: takes the arguments, the first row and the end row; returns the row at which it stopped.
    """
    if rows * width <= _SHARE:
        return _is_done(work(*arguments, 0, rows), rows)
    failed: list[int] = []

    def share(start: int, stop: int) -> None:
        if not _is_done(work(*arguments, start, stop), stop):
            failed.append(start)

    for_each_slice(share, total=rows, least=max(1, _SHARE // width))
    return not failed


def _is_done(reached: int, stop: int) -> bool:
    if reached == _NO_MEMORY:
        raise MemoryError
    return reached == stop
