"""Kernels on unchanged weights, int16 or int8 `[o, d]`. The kernels convert one block at a time, and never hold a
second full copy.

int32   torch's integer matmul wraps modulo 2^32, so it is exact. CPU only. Fast for few rows.
fp64    exact while every partial sum is an integer of at most 2^53; longer sums are split.
"""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.kernels.kernel import Kernel, Packed

_CPU_BLOCK, _GPU_BLOCK = 1 << 19, 1 << 26  # weights that are converted at a time


class _PlainKernel(Kernel):
    layout = "plain"
    block = granule = 1

    def is_candidate(self, device: torch.device) -> bool:
        return device.type != "cpu" or not native.vectorised()

    def form(self, outputs: int, inputs: int, *, weight_bits: int) -> tuple[torch.dtype, tuple[int, ...]]:
        return torch.int8 if weight_bits <= 8 else torch.int16, (outputs, inputs)

    def pack(self, weight: Tensor, *, weight_bits: int) -> Packed:
        outputs, inputs = weight.shape
        dtype, _ = self.form(outputs, inputs, weight_bits=weight_bits)
        return Packed(self.layout, outputs, inputs, weight_bits, weight.to(dtype, copy=True).contiguous())

    def product(self, packed: Packed, rows: Tensor, direction: Direction, out: Tensor) -> None:
        rows = self._widen(rows)
        if direction == FORWARD:
            for part, block in self._blocks(packed):
                self._add(out[:, part].zero_(), rows, block.t(), packed.weight_bits)
        else:
            out.zero_()
            for part, block in self._blocks(packed):
                self._add(out, rows[:, part], block, packed.weight_bits)

    def _blocks(self, packed: Packed) -> Iterator[tuple[slice, Tensor]]:
        weights = _CPU_BLOCK if packed.data.device.type == "cpu" else _GPU_BLOCK
        step = max(1, weights // packed.inputs)
        for start in range(0, packed.outputs, step):
            part = slice(start, min(start + step, packed.outputs))
            yield part, self._widen(packed.data[part])

    @abstractmethod
    def _widen(self, values: Tensor) -> Tensor:
        """Convert to the dtype of the product."""

    @abstractmethod
    def _add(self, out: Tensor, rows: Tensor, matrix: Tensor, weight_bits: int) -> None:
        """Add `rows @ matrix`, both widened, to int32 `out`."""


class Int32Kernel(_PlainKernel):
    name = "int32"

    def supports(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def _widen(self, values: Tensor) -> Tensor:
        return values.to(torch.int32)

    def _add(self, out: Tensor, rows: Tensor, matrix: Tensor, weight_bits: int) -> None:
        out.add_(rows @ matrix)


class Float64Kernel(_PlainKernel):
    name = "fp64"

    def supports(self, device: torch.device) -> bool:
        return True

    def _widen(self, values: Tensor) -> Tensor:
        return values.to(torch.float64)

    def _add(self, out: Tensor, rows: Tensor, matrix: Tensor, weight_bits: int) -> None:
        # |row| <= 2^31 and |weight| < 2^(b-1): a sum of this many terms is at most 2^53
        terms = 1 << (23 - weight_bits)
        for start in range(0, rows.shape[1], terms):
            part = slice(start, start + terms)
            out.add_((rows[:, part] @ matrix[part]).to(torch.int64).to(torch.int32))
