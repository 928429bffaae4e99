"""Kernels that call torch's matrix products.

int32   unchanged weights, int16 or int8 `[o, d]`: torch's integer matmul wraps modulo 2^32, so it is exact. CPU only.
        Fast for few rows.
fp64    unchanged weights: exact while every partial sum is an integer of at most 2^53; longer sums are split. Both
        kernels convert one block at a time, and never hold a second full copy.
limbs   int8 matrix units (CUDA tensor cores, AMX): rows are split into four balanced int8 limbs, weights into one or
        two int8 digits. Pairs whose shift is 32 or more are 0 modulo 2^32; seven int8 products remain for 9 to 15
        weight bits, four for up to 8. The units need the second matrix in column order, so the digits are stored in
        that order for the forward direction, and transposed block by block for the backward direction.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from symbiosis_priv import native
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.kernels.kernel import Kernel, Packed

_CPU_WEIGHTS, _GPU_WEIGHTS = 1 << 19, 1 << 26  # weights that are converted at a time


class _PlainKernel(Kernel):
    layout = "plain"
    shard_granule = granule = 1

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
            for outputs, weights in self._converted(packed):
                self._add(out[:, outputs].zero_(), rows, weights.t(), packed.weight_bits)
        else:
            out.zero_()
            for outputs, weights in self._converted(packed):
                self._add(out, rows[:, outputs], weights, packed.weight_bits)

    def _converted(self, packed: Packed) -> Iterator[tuple[slice, Tensor]]:
        most = _CPU_WEIGHTS if packed.data.device.type == "cpu" else _GPU_WEIGHTS
        step = max(1, most // packed.inputs)
        for start in range(0, packed.outputs, step):
            outputs = slice(start, min(start + step, packed.outputs))
            yield outputs, self._widen(packed.data[outputs])

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
            summed = slice(start, start + terms)
            out.add_((rows[:, summed] @ matrix[summed]).to(torch.int64).to(torch.int32))


BALANCE = -0x7F7F7F80
"""0x80808080 as int32: adding it and then xoring with it makes every byte a balanced digit."""

_TURNED_AT_A_TIME = 1 << 22  # weights per block
_MULTIPLE = 8  # every dimension is padded to a multiple of it, as the units require


class DigitKernel(Kernel):
    """Base of kernels on int8 digits: a plane of low digits and, beyond 8 weight bits, a plane of high digits."""

    layout = "digits"
    granule = _MULTIPLE

    def form(self, outputs: int, inputs: int, *, weight_bits: int) -> tuple[torch.dtype, tuple[int, ...]]:
        digits = 1 if weight_bits <= 8 else 2
        return torch.int8, (digits, outputs + -outputs % _MULTIPLE, inputs + -inputs % _MULTIPLE)

    def pack(self, weight: Tensor, *, weight_bits: int) -> Packed:
        outputs, inputs = weight.shape
        digits = [weight]
        if weight_bits > 8:
            low = ((weight + 0x80) & 0xFF) - 0x80
            digits = [low, (weight - low) >> 8]
        padding = (0, -inputs % _MULTIPLE, 0, -outputs % _MULTIPLE)
        data = torch.stack([pad(digit.to(torch.int8), padding) for digit in digits])
        return Packed(self.layout, outputs, inputs, weight_bits, data)

    def cut(self, packed: Packed, start: int, stop: int) -> Packed:
        return replace(packed, outputs=stop - start, data=packed.data[:, start:stop])


class LimbKernel(DigitKernel):
    name = "limbs"

    def supports(self, device: torch.device) -> bool:
        return True

    def is_candidate(self, device: torch.device) -> bool:
        return device.type != "cpu" or not native.vectorised() or torch.cpu._is_amx_tile_supported()

    def max_terms(self) -> int:
        return 1 << 16  # products of 2^7 * 2^7 in int32 accumulators

    def product(self, packed: Packed, rows: Tensor, direction: Direction, out: Tensor) -> None:
        if direction == FORWARD:
            width, steps = packed.data.shape[2], [(slice(0, packed.outputs), [w.t() for w in packed.data])]
            self._product(rows, width, iter(steps), out)
        else:
            self._product(rows, packed.data.shape[1], self._turned(packed.data), out)

    def _turned(self, digits: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """Divide a backward product by its output columns. Yields the slice of columns of each step, and the digits
        `[o, columns]` of each plane, stored column by column."""
        _, outputs, inputs = digits.shape
        step = max(1, _TURNED_AT_A_TIME // outputs // _MULTIPLE) * _MULTIPLE
        for start in range(0, inputs, step):
            columns = slice(start, start + step)
            yield columns, [w[:, columns].t().contiguous().t() for w in digits]

    def _product(self, rows: Tensor, width: int, steps: Iterator[tuple[slice, list[Tensor]]], out: Tensor) -> None:
        count = rows.shape[0]
        padded = max(_MULTIPLE, count + -count % _MULTIPLE)
        x = pad(rows, (0, width - rows.shape[1], 0, padded - count))
        x.add_(BALANCE).bitwise_xor_(BALANCE)
        limbs = x.new_empty((4, *x.shape), dtype=torch.int8)
        for limb in limbs:
            limb.copy_(x)  # the lowest byte of the row
            x >>= 8
        for columns, matrices in steps:
            target = out[:, columns].zero_()
            # CUDA requires more than 16 rows: there are at least 3 limbs of 8 rows
            for j, matrix in enumerate(matrices):
                products = torch._int_mm(limbs[: 4 - j].flatten(0, 1), matrix).view(4 - j, padded, -1)
                for i, product in enumerate(products):
                    target.add_(product[:count, : target.shape[1]], alpha=1 << 8 * (i + j))
