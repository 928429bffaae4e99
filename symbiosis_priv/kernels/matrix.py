"""`RingMatrix`: weights packed for one device, and the exact products of tenants and providers with them.

A stack of experts is one packed matrix as well, and serves two kinds of products. A dense product takes the matrix of
all experts. A product with `counts` takes rows sorted by expert, each with the matrix of its own expert: a range of
the packed outputs, which kernels read where it lies. Experts are always joined along the packed outputs: a stack that
is joined along its inputs (down) is packed transposed, and its directions are exchanged.
"""

import copy
import math
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD, Direction, Widths, opposite
from symbiosis_priv.arithmetic.segments import Counts, check_counts, segments
from symbiosis_priv.errors import RangeError
from symbiosis_priv.kernels.choice import Choice, choose
from symbiosis_priv.kernels.kernel import Packed, PayloadProduct
from symbiosis_priv.limits import RingBits

_CPU_ROWS = 256  # a product on a CPU is cut into pieces of 256 to 511 rows: this limits a kernel's own buffers


class RingMatrix:
    """A weight matrix, int16 `[o, d]`, ready for exact products on one device. Holds one packed copy and no other.
    `height` is as for `choose`. Raises `ConfigError`: no kernel is exact here."""

    def __init__(
        self, weight: Tensor, *, weight_bits: int, device: torch.device | str = "cpu", height: int = 0
    ) -> None:
        choice = choose(weight_bits=weight_bits, device=torch.device(device), height=height)
        self._hold(choice.few.pack(weight.cpu(), weight_bits=weight_bits), choice, device)

    @classmethod
    def of_packed(
        cls, packed: Packed, choice: Choice, *, device: torch.device | str = "cpu", results: Path | None = None
    ) -> Self:
        """A matrix of weights that are already packed in the choice's layout. Shares their memory if possible.
        `results`: see `Kernel.prepare`."""
        matrix = cls.__new__(cls)
        matrix._hold(packed, choice, device, results)
        return matrix

    def as_stack(self, experts: int, *, transposed: bool) -> Self:
        """The same packed weights as a stack of experts that is joined along the packed outputs. With `transposed`, the
        packed weights are those of the transposed stack."""
        stack = copy.copy(self)
        stack.experts, stack._transposed = experts, transposed
        return stack

    def _hold(self, packed: Packed, choice: Choice, device: torch.device | str, results: Path | None = None) -> None:
        self.device = torch.device(device)
        self.experts, self._transposed = 1, False
        self.chosen = choice.kernel
        self._packed = packed.to(self.device)
        for kernel in dict.fromkeys(choice):
            kernel.prepare(self._packed, results)

    @property
    def nbytes(self) -> int:
        return self._packed.data.nbytes

    def columns(self, direction: Direction, *, by_expert: bool = False) -> Widths:
        """The columns of a product's rows and of its result, for the whole matrix or for one expert's."""
        outputs = self._packed.outputs // (self.experts if by_expert else 1)
        return Widths.of(self._packed.inputs, outputs, self._as_packed(direction))

    def product(
        self,
        rows: Tensor,
        direction: Direction = FORWARD,
        *,
        counts: Counts | None = None,
        ring_bits: RingBits = 32,
        out: Tensor | None = None,
    ) -> Tensor:
        """`rows @ W.T` forward, `rows @ W` backward, mod 2^ring_bits (the bits above are arbitrary): int32 `[r, d]` on
        any device to `[r, o]` on this matrix's, contiguous, in `out` if given; the other way round backward. r may be
        0. With `counts`, the rows of each expert of a stack, each row is multiplied by one expert's matrix only. Raises
        `RangeError`: wrong shape or dtype, or the counts are not those of these rows."""
        width, columns = self.columns(direction, by_expert=counts is not None)
        if rows.dim() != 2 or rows.shape[1] != width or rows.dtype != torch.int32:
            raise RangeError(f"expected int32 rows of width {width}, got {rows.dtype} {list(rows.shape)}")
        count = rows.shape[0]
        if out is None:
            if self.device.type == "cpu":  # docs/adr/9-lane.md
                out = torch.from_numpy(np.empty((count, columns), dtype=np.int32))
            else:
                out = torch.empty((count, columns), dtype=torch.int32, device=self.device)
        elif out.shape != (count, columns) or out.dtype != torch.int32 or not out.is_contiguous():
            raise RangeError(f"expected a contiguous int32 {[count, columns]} to write to, got {list(out.shape)}")
        if rows.device != self.device:
            rows = rows.to(self.device)
        rows, direction = rows.contiguous(), self._as_packed(direction)
        if counts is None:
            self._multiply(self._packed, rows, direction, out, ring_bits)
            return out
        check_counts(counts, experts=self.experts, rows=count)
        height = self._packed.outputs // self.experts
        for expert, segment in segments(counts):
            start = expert * height
            matrix = self.chosen(count).cut(self._packed, start, start + height)
            self._multiply(matrix, rows[segment], direction, out[segment], ring_bits)
        return out

    def few(self, direction: Direction, count: int, ring_bits: RingBits) -> PayloadProduct | None:
        """Return the product of `count` rows as one compiled call; None if there is none (`Kernel.few`)."""
        if self.device.type != "cpu" or not 0 < count <= _CPU_ROWS:
            return None
        direction = self._as_packed(direction)
        return self.chosen(count).few(self._packed, direction, count, ring_bits)

    def _as_packed(self, direction: Direction) -> Direction:
        """Return the direction of the packed weights that corresponds to a direction of this matrix."""
        return opposite(direction) if self._transposed else direction

    def _multiply(self, packed: Packed, rows: Tensor, direction: Direction, out: Tensor, ring_bits: RingBits) -> None:
        count = rows.shape[0]
        pieces = max(1, count // _CPU_ROWS) if self.device.type == "cpu" else 1
        step = math.ceil(count / pieces) or 1
        for start in range(0, count, step):
            block = slice(start, start + step)
            self.chosen(count).product(packed, rows[block], direction, out[block], ring_bits=ring_bits)
