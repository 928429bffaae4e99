"""The tenant's two passes over its rows. Each pass reads and writes a matrix once, row by row in the cache.

    encode    quantise, and compute the expected value of the check
    decode    subtract the masks' effects, check, and write floats into the tensors of the group's linears

The compiled library and torch do the same float64 operations in the same order, so their bits agree. The bits of a row
depend on that row only. The compiled library sets the floating-point mode itself. With torch, bits of rows with
denormal numbers depend on the modes of the calling thread and of torch's pool, which keeps the mode of its first
operation: do not call `torch.set_flush_denormal(True)` there. Do not use the floats of rows that `decode` refuses.

A check compares `y @ R` with `xq @ V` modulo p for the integers y and xq (`modular`, `tenant.core.verifier`).

Memory for large matrices is used again (`Buffers`). A new large matrix costs a page fault and a cleared page for every
4 KiB; one step of fine-tuning makes hundreds of megabytes of matrices. A buffer returns to the pool when no array,
slice or view refers to it, so memory that is still read is never overwritten. A buffer keeps its old contents: one
`Buffers` serves one session or one connection, never two tenants. Pages are private to the process, also after a fork.
"""

import contextlib
import ctypes
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

from symbiosis_priv import native
from symbiosis_priv.arithmetic.modular import Column, dot
from symbiosis_priv.arithmetic.ring import Bound, dequantise, quantise_rows, row_blocks
from symbiosis_priv.errors import NonFiniteError, RangeError
from symbiosis_priv.limits import DEFAULT_RING_BITS, RingBits
from symbiosis_priv.native import FORMATS, all_rows, array_of, layout, pointer, readable


def encode(
    inputs: Sequence[Tensor],  # float `[r, w_k]` on the CPU, one dtype: the column blocks of the rows
    *,
    bound: Bound,  # the product's public bound; its `inputs` are the sum of all w_k
    out: Tensor,  # int32 `[r, d]`, contiguous; written
    fold: Tensor | None = None,  # float64 `[d]`, factors of the columns before quantisation
    v: Column | None = None,  # V, or None for no check
    expected: Tensor | None = None,  # int64 `[r]`; set to `xq @ V` modulo p if there is a V
) -> Tensor:
    """Quantise float rows to ring rows. Returns float64 `[r]`, the rows' scales (secret, rule 5). Raises
    `NonFiniteError`: a row holds inf or nan; `RangeError`: wrong shape or dtype."""
    rows, width = out.shape
    shaped = all(part.dim() == 2 and len(part) == rows and part.dtype.is_floating_point for part in inputs)
    if width != bound.inputs or not shaped or sum(part.shape[1] for part in inputs) != width:
        shapes = [list(part.shape) for part in inputs]
        raise RangeError(f"expected float rows of shape [{rows}, {bound.inputs}], got {inputs[0].dtype} {shapes}")
    scale = vector(rows, np.float64)
    compiled = native.compiled(brief=rows * width <= BRIEF)
    if compiled is None:
        for start, stop in row_blocks(rows, width):
            block = inputs[0][start:stop] if len(inputs) == 1 else torch.cat([p[start:stop] for p in inputs], dim=1)
            out[start:stop], block_scale = quantise_rows(block, bound, fold=fold)
            scale[start:stop] = block_scale[:, 0]
            if v is not None and expected is not None:
                expected[start:stop] = dot(out[start:stop], v)
        return scale

    library, isa = compiled
    parts = readable(inputs)
    operands = isa, layout(parts), width, pointer(fold), bound.l1, bound.l2, None if v is None else v.limbs.data_ptr()
    written = None, 0, out.data_ptr(), scale.data_ptr(), pointer(expected)
    if not all_rows(library.ring_encode, *operands, *written, rows=rows, width=width):
        raise NonFiniteError
    return scale


def decode(
    answer: Tensor,  # int32 `[r, o]`, contiguous
    outputs: Sequence[Tensor],  # float `[r, w_k]` on the CPU, one dtype, for the columns of each linear; written
    *,
    scale: Tensor,  # float64 `[r]` from `encode`
    effects: Sequence[Tensor] = (),  # int32 `[r, o]` each, contiguous; subtracted modulo 2^ring_bits
    channel_scale: Tensor | None = None,  # float64 `[o]`, the weight scales; None if folded into the rows (backward)
    bias: Tensor | None = None,  # float64 `[o]`; needs channel scales
    column: Column | None = None,  # R, or None for no check
    expected: Tensor | None = None,  # int64 `[r]`, as `encode` set it
    ring_bits: RingBits = DEFAULT_RING_BITS,  # that count; the result is the signed representative
) -> list[int]:
    """Turn masked answers into float rows, and check them. Returns the numbers of the rows that failed the check. Their
    floats must not be used."""
    rows, width = answer.shape
    compiled = native.compiled(brief=rows * width <= BRIEF)
    if compiled is None:
        wrong = []
        for start, stop in row_blocks(rows, width):
            block = unmask(answer[start:stop], [effect[start:stop] for effect in effects], ring_bits=ring_bits)
            if column is not None and expected is not None:
                wrong += [start + row for row in refused(block, column, expected[start:stop])]
            y = dequantise(block, scale=scale[start:stop, None], channel_scale=channel_scale)
            if bias is not None:
                y.add_(bias)
            for part, out in zip(y.split([out.shape[1] for out in outputs], dim=1), outputs, strict=True):
                out[start:stop] = part
        return wrong

    library, isa = compiled
    written = []  # what the compiled code can write to; torch copies from it with the same rounding
    for out in outputs:
        dtype = out.dtype if out.dtype in FORMATS else torch.float32
        fits = dtype == out.dtype and out.stride(1) == 1
        written.append(out if fits else torch.empty(out.shape, dtype=dtype, device="cpu"))
    flags = (ctypes.c_uint8 * rows)()  # its address takes less time than an array's or a tensor's
    masks = answer.data_ptr(), array_of([effect.data_ptr() for effect in effects]), len(effects)
    check = None if column is None else column.limbs.data_ptr(), pointer(expected)
    floats = scale.data_ptr(), pointer(channel_scale), pointer(bias), layout(written), flags
    operands = isa, *masks, width, DEFAULT_RING_BITS - ring_bits, *check, *floats
    all_rows(library.ring_decode, *operands, rows=rows, width=width)
    for part, out in zip(written, outputs, strict=True):
        if part is not out:
            out.copy_(part)
    marks = bytes(flags)
    return [row for row, mark in enumerate(marks) if mark] if 1 in marks else []


def unmask(answer: Tensor, effects: Sequence[Tensor], *, ring_bits: RingBits = DEFAULT_RING_BITS) -> Tensor:
    """Subtract the effects modulo 2^ring_bits. Returns the signed representatives, int32 `[r, o]`."""
    for effect in effects:
        answer = answer - effect
    shift = DEFAULT_RING_BITS - ring_bits
    return answer << shift >> shift if shift else answer


def refused(rows: Tensor, column: Column, expected: Tensor) -> list[int]:
    """The numbers of the integer rows that fail the check; int32 `[r, o]` contiguous, int64 `[r]`."""
    wrong: list[int] = (dot(rows, column) != expected).nonzero()[:, 0].tolist()
    return wrong


def vector(size: int, dtype: type[np.generic]) -> Tensor:
    """Return an uninitialised CPU vector. numpy allocates a small one in a fifth of torch's time."""
    return torch.from_numpy(np.empty(size, dtype=dtype))


BRIEF = 1 << 14
"""Entries of a matrix whose pass keeps the GIL (docs/adr/9-lane.md)."""
_SMALL = 1 << 18  # the C library pools smaller blocks itself
_STEPS = 8  # sizes between a power of two and the next


class Buffers:
    """A pool of uninitialised memory. Safe under threads and in finalisers. Beyond `limit` bytes of unused blocks, the
    block that was unused for longest is freed."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self.unused = 0
        # by length; the block that was unused for longest comes first
        self._free: defaultdict[int, deque[mmap.mmap]] = defaultdict(deque)
        self._ages: OrderedDict[int, mmap.mmap] = OrderedDict()  # all blocks by identity, in the same order
        self._lock = threading.RLock()  # reentrant, because a finaliser may run in the middle of `array`

    def array(self, rows: int, columns: int, *, dtype: type[np.generic] = np.int32) -> NDArray[Any]:
        """Return a contiguous matrix `[rows, columns]`. The dtype has 4 bytes. Its memory returns to the pool when the
        array and all its views are gone."""
        size = rows * columns * 4
        if size < _SMALL:  # numpy allocates in a fifth of torch's time
            return np.empty((rows, columns), dtype=dtype)
        # one of eight sizes per power of two, so that matrices of similar row counts share buffers
        step = (1 << size.bit_length() - 1) // _STEPS
        length = -(-size // step) * step
        with self._lock:
            block = self._free[length].pop() if self._free[length] else None
            if block is not None:
                del self._ages[id(block)]
                self.unused -= length
        block = block or _fresh(length)
        array: NDArray[np.uint8] = np.frombuffer(block, dtype=np.uint8, count=size)
        weakref.finalize(array, self._give_back, block).atexit = False
        return array.view(dtype).reshape(rows, columns)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Return a contiguous int32 matrix `[rows, columns]` in memory of the pool."""
        return torch.from_numpy(self.array(rows, columns))

    def _give_back(self, block: mmap.mmap) -> None:
        if len(block) > self._limit:
            return
        with self._lock:
            self._free[len(block)].append(block)
            self._ages[id(block)] = block
            self.unused += len(block)
            while self.unused > self._limit:
                _, oldest = self._ages.popitem(last=False)
                self._free[len(oldest)].popleft()
                self.unused -= len(oldest)


def large_tensor(shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous CPU tensor outside the pool, on huge pages if the system has them. numpy must have
    the dtype."""
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    like = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    return torch.from_numpy(np.frombuffer(_fresh(size), dtype=like).reshape(shape))


def _fresh(length: int) -> mmap.mmap:
    # private, because shared mappings would be written by both sides of a fork, and never use large pages
    block = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # where the system has large pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
