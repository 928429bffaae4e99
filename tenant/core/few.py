"""A few rows in two compiled calls, whose arguments are prepared once.

For a few rows, Python's way through `parts` takes longer than the arithmetic. `FewRows` takes the same steps in the
same order: quantise and compute the expected check; later subtract the effects, check, dequantise. The masking between
them is `masked.mask`. Whenever anything is unusual, `part` makes the `Part` with which the usual way goes on: the same
integers, pads and masked rows.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic.modular import Column
from symbiosis_priv.errors import NonFiniteError
from symbiosis_priv.limits import DEFAULT_RING_BITS
from symbiosis_priv.native import FORMATS, layout, pointer
from tenant.core.masked import MaskedRows
from tenant.core.pads import Pad
from tenant.core.parts import FloatRows, Part

MOST_FEW = 16
"""Largest number of rows for which the way through `parts` costs more than it saves."""


class Encoded(NamedTuple):
    """Rows in the ring, int32 `[r, d]`, and R applied to their true product, int64 `[r]`."""

    words: Tensor
    expected: Tensor


class FewRows:
    """Both passes over `like.count` rows of the layer group and direction of `like`.

    Args:
        like: a part of float rows for one matrix; all rows of its product.
        v: V of the matrix.
    """

    def __init__(self, like: Part, v: Column) -> None:
        rows, library = like.rows, native.library()
        assert isinstance(rows, FloatRows)
        assert library is not None
        self.count, self.width, self.outputs = like.count, like.width, like.outputs
        self._place = like.index, like.direction
        self._column, self._second, self._bound = like.column, like.second, rows.bound
        self._encode, self._decode, self._isa = library.ring_encode, library.ring_decode, int(native.best(library))
        self._kept = v, rows.fold, rows.channel_scale, rows.bias  # the library reads them through their addresses
        self._before = like.width, pointer(rows.fold), rows.bound.l1, rows.bound.l2, v.limbs.data_ptr()
        self._check = DEFAULT_RING_BITS - rows.ring_bits, like.column.limbs.data_ptr()
        self._after = pointer(rows.channel_scale), pointer(rows.bias)
        self._flags = ctypes.c_uint8 * like.count

    def takes(self, rows: FloatRows) -> bool:
        """Returns True if these rows are like those that the arguments were prepared for."""
        return rows.bound is self._bound and all(_is_plain(part) for part in (*rows.inputs, *rows.outputs))

    def encode(self, rows: FloatRows) -> Encoded:
        """Quantise rows that `takes` accepts. Raises `NonFiniteError`: inf or nan among the rows."""
        words = torch.empty((self.count, self.width), dtype=torch.int32, device="cpu")
        expected = torch.empty(self.count, dtype=torch.int64, device="cpu")
        rows.scale = torch.empty(self.count, dtype=torch.float64, device="cpu")
        to = words.data_ptr(), rows.scale.data_ptr(), expected.data_ptr()
        done = self._encode(self._isa, layout(rows.inputs), *self._before, *to, 0, self.count)
        if done != self.count:
            raise MemoryError if done < 0 else NonFiniteError
        return Encoded(words, expected)

    def decode(self, rows: FloatRows, encoded: Encoded, answer: Tensor, pads: Sequence[Pad]) -> bool:
        """Unmask and check an answer, int32 `[r, o]`, and write the results. Returns False if a row failed the check:
        the results must then not be used."""
        effects = [effect for pad in pads for effect in pad.effects()]
        flags = self._flags()
        done = self._decode(
            self._isa,
            answer.data_ptr(),
            native.addresses(effects),
            len(effects),
            self.outputs,
            *self._check,
            encoded.expected.data_ptr(),
            rows.scale.data_ptr(),
            *self._after,
            layout(rows.outputs),
            flags,
            0,
            self.count,
        )
        if done != self.count:
            raise MemoryError
        return not any(flags)

    def part(self, rows: FloatRows, encoded: Encoded, pads: Sequence[Pad], sent: MaskedRows | None) -> Part:
        """The part with which the usual way goes on: masked already, or (`sent` is None) not yet."""
        words, expected = encoded
        part = Part(*self._place, rows, 0, words, self._column, expected, self._second, pads, self.outputs)
        if sent is not None:
            part.sent = sent
            del part.encoded
        return part


def _is_plain(matrix: Tensor) -> bool:
    """Returns True if the compiled passes read or write the matrix in place."""
    return matrix.dtype in FORMATS and matrix.stride(1) == 1
