"""Arithmetic modulo p = 2^61 - 1: one secret column checks a product of integers (`tenant.core.verifier`).

A column R of residues is multiplied with int32 rows, and once with the int16 weights, when keys are made. All products
are exact. The compiled library splits residues into limbs of 21, 20 and 20 bits: products with int32 stay below 2^52,
and 1,024 of them sum up in int64. torch splits them into digits so small that float64 sums are integers below 2^53.

p is a prime above 2^33: the difference of two int32 numbers is 0 modulo p only if it is 0.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic.keystream import StreamKey, expand
from symbiosis_priv.arithmetic.ring import row_blocks
from symbiosis_priv.native import pointer

PRIME: Final = (1 << 61) - 1
_BITS: Final = 61
_HALF_BITS: Final = 31
_HALF: Final = (1 << _HALF_BITS) - 1
_LIMBS: Final = (0, 21, 41, _BITS)

_ROW_DIGIT, _ROW_CHUNK = 8, 1 << 14  # 2^31 * 2^8 * 2^14 = 2^53
_WEIGHT_DIGIT = 16  # 2^15 * 2^16 * 2^21 < 2^53


@dataclass(frozen=True, eq=False)
class Column:
    """A column of residues, int64 `[n]` in 0..p-1, and two representations for products (made on first use)."""

    values: Tensor

    @functools.cached_property
    def limbs(self) -> Tensor:
        """The column in limbs, as the compiled code reads it: int32 `[3, n]`."""
        parts = [self.values >> low & (1 << high - low) - 1 for low, high in itertools.pairwise(_LIMBS)]
        return torch.stack(parts).to(torch.int32)

    @functools.cached_property
    def digits(self) -> Tensor:
        """The column in digits, as torch multiplies it: float64 `[n, 8]`."""
        return self.digits_of(_ROW_DIGIT)

    def digits_of(self, bits: int) -> Tensor:
        """The column in digits of `bits` bits: float64 `[n, ceil(61 / bits)]`, lowest digit first."""
        return torch.stack([self.values >> low & (1 << bits) - 1 for low in range(0, _BITS, bits)], dim=1).double()

    def __len__(self) -> int:
        return len(self.values)


def uniform(key: StreamKey, count: int) -> Column:
    """A secret column from a 256-bit key: 61 bits of keystream per entry; the value p counts as 0. So 0 has probability
    2^-60 and every other residue 2^-61: an equation for one entry holds with probability 2^-60 at most."""
    values = expand(key, first_row=0, rows=1, width=2 * count).view(torch.int64)[0] & PRIME
    return Column(values.masked_fill_(values == PRIME, 0))


def dot(rows: Tensor, column: Column) -> Tensor:
    """`rows @ column` modulo p; int32 `[r, n]` contiguous to int64 `[r]` in 0..p-1."""
    count, width = rows.shape
    library = native.library()
    if library is None:
        total, floats = torch.zeros(count, dtype=torch.int64, device="cpu"), rows.to(torch.float64)
        for start in range(0, width, _ROW_CHUNK):
            part = slice(start, start + _ROW_CHUNK)
            total += _joined((floats[:, part] @ column.digits[part]).to(torch.int64), _ROW_DIGIT)
        return total.remainder_(PRIME)
    products = torch.empty(count, dtype=torch.int64, device="cpu")
    library.ring_dot(native.best(library), pointer(rows), count, width, pointer(column.limbs), pointer(products))
    return products


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """`a * b` modulo p, entry by entry; residues in int64, shapes broadcast."""
    low, high = a & _HALF, a >> _HALF_BITS
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for shift in (48, 32, 16, 0):  # 16 bits of b at a time: products with 31 bits of a stay in int64
        digit = b >> shift & 0xFFFF
        total = (shifted(total, 16) + low * digit + shifted(high * digit, _HALF_BITS)).remainder(PRIME)
    return total


def weigh(weight: Tensor, forward: Column, backward: Column) -> tuple[Tensor, Tensor]:
    """Products of an int16 weight `[o, d]` with two secret columns, `[o]` and `[d]`: `W.T @ forward` and `W @ backward`
    modulo p, int64 `[d]` and `[o]`."""
    weight = weight.contiguous()
    outputs, inputs = weight.shape
    library = native.library()
    if library is not None:
        sums = torch.zeros((3, inputs), dtype=torch.int64, device="cpu")
        to_inputs = torch.empty(inputs, dtype=torch.int64, device="cpu")
        to_outputs = torch.empty(outputs, dtype=torch.int64, device="cpu")
        columns = pointer(forward.limbs), outputs, pointer(backward.limbs)
        operands = pointer(weight), outputs, inputs, *columns, pointer(sums), pointer(to_outputs)
        library.ring_weigh(native.best(library), *operands)
        library.ring_join(pointer(sums), inputs, pointer(to_inputs))
        return to_inputs, to_outputs
    down, up = forward.digits_of(_WEIGHT_DIGIT), backward.digits_of(_WEIGHT_DIGIT)
    gathered = torch.zeros((inputs, down.shape[1]), dtype=torch.float64, device="cpu")
    scattered = torch.empty((outputs, up.shape[1]), dtype=torch.float64, device="cpu")
    for start, stop in row_blocks(outputs, inputs):
        block = weight[start:stop].to(torch.float64)
        gathered.addmm_(block.t(), down[start:stop])
        torch.mm(block, up, out=scattered[start:stop])
    return _joined(gathered.to(torch.int64), _WEIGHT_DIGIT), _joined(scattered.to(torch.int64), _WEIGHT_DIGIT)


def _joined(sums: Tensor, bits: int) -> Tensor:
    """Residues int64 `[n]` of `sum_k sums[:, k] 2^(bits k)`."""
    total = torch.zeros(len(sums), dtype=torch.int64, device="cpu")
    for digit in reversed(sums.unbind(dim=1)):
        total = (shifted(total, bits) + digit.remainder(PRIME)).remainder_(PRIME)
    return total


def shifted(residues: Tensor, bits: int) -> Tensor:
    """Multiply int64 residues by 2^bits, entry by entry. Because 2^61 is 1 modulo p, this is a rotation of 61 bits."""
    return (residues << bits & PRIME) | (residues >> _BITS - bits)
