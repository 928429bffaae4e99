"""A few rows in two compiled calls, whose arguments are prepared once: the arithmetic of `tenant.session.lane`."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic.modular import Column
from symbiosis_priv.arithmetic.passes import BRIEF
from symbiosis_priv.errors import NonFiniteError
from symbiosis_priv.limits import DEFAULT_RING_BITS
from symbiosis_priv.native import array_of, pointer
from tenant.core.masked import MaskedRows, mask
from tenant.core.pads import Pad
from tenant.core.parts import FloatRows, Part

MOST_FEW = 16
"""Largest number of rows of `FewRows`."""

Layout = ctypes.Array[ctypes.c_int64]
"""Addresses, or the column blocks of a matrix (`native.layout`)."""
Places = tuple[Layout, Layout]
"""Where the rows of a product are read, and where its results are written."""


class Space(NamedTuple):
    """Memory for one product of `FewRows`: `words` int32 `[r, d]`, `numbers` float64 `[2, r]`, `answer` int32 `[r, o]`,
    and a flag for each row. `numbers` holds the rows' scales, and the bits of R applied to their true product, int64.
    """

    words: Tensor
    numbers: Tensor
    answer: Tensor
    refused: ctypes.Array[ctypes.c_uint8]
    addresses: tuple[int, int, int]


class PreparedPads(NamedTuple):
    """Pads for the rows of `FewRows`, with the addresses of their masks and of their effects, which are `kept`."""

    pads: Sequence[Pad]
    kept: Sequence[object]
    masks: Layout
    effects: Layout


class FewRows:
    """A few rows in two compiled calls, whose arguments are prepared once: `like.count` rows of the layer group and
    direction of `like`. For a few rows, Python's way through `Part` takes longer than the arithmetic. `space` and
    `prepared` prepare the rest, which does not depend on the rows, while another answer is awaited.

    The steps and their order are the same: quantise, compute the expected check and add the masks; later subtract the
    effects, check, dequantise. A pad is burnt before its rows become `MaskedRows`. Whenever anything is unusual, `part`
    makes the `Part` with which the usual way goes on: the same integers, pads and masked rows.

    Args:
        like: a part of float rows for one matrix; all rows of its product.
    """

    def __init__(self, like: Part) -> None:
        plan, rows, compiled = like.plan, like.rows, native.compiled(brief=like.count * like.widest <= BRIEF)
        assert isinstance(rows, FloatRows)
        assert isinstance(plan.v, Column)
        assert compiled is not None
        self.count, self.width, self.outputs = like.count, plan.inputs, plan.outputs
        self._plan, self.bound = plan, rows.bound
        self._encode, self._decode, self._isa = compiled.library.ring_encode, compiled.library.ring_decode, compiled.isa
        self._kept = rows.fold, rows.channel_scale, rows.bias  # the library reads them through their addresses
        self._before = plan.inputs, pointer(rows.fold), rows.bound.l1, rows.bound.l2, plan.v.limbs.data_ptr()
        self._check = self.outputs, DEFAULT_RING_BITS - rows.ring_bits, plan.column.limbs.data_ptr()
        self._after = pointer(rows.channel_scale), pointer(rows.bias)
        self._flags = ctypes.c_uint8 * like.count
        self.entries = 4 * self.count + self.count * (self.width + self.outputs)

    def space(self, memory: Tensor) -> Space:
        """Return memory of one product: the first `entries` of `memory`, int32."""
        rows, scales = self.count, memory.data_ptr()  # float64 first, because of their alignment
        numbers, words, answer = memory[: self.entries].split([4 * rows, rows * self.width, rows * self.outputs])
        addresses = words.data_ptr(), scales, scales + 8 * rows
        numbers = numbers.view(torch.float64).view(2, rows)
        return Space(words.view(rows, -1), numbers, answer.view(rows, -1), self._flags(), addresses)

    def prepared(self, pads: Sequence[Pad]) -> list[PreparedPads]:
        """Prepare a pad whose effects have arrived, or no pad, for one or several products, the last one first."""
        if not pads:
            return [PreparedPads(pads, (), array_of(()), array_of(()))]
        [pad], count, found = pads, self.count, list[PreparedPads]()
        masks, effects = [share.keystream.expand(share.first_row, pad.rows) for share in pad.shares], pad.effects()
        for first, one in zip(range(0, pad.rows, count), pad.cut(count), strict=True):
            places = [array_of([m.data_ptr() + 4 * first * m.shape[1] for m in kept]) for kept in (masks, effects)]
            found.append(PreparedPads([one], (masks, effects), *places))
        return found[::-1]

    def mask(self, inputs: Layout, pads: PreparedPads, space: Space) -> MaskedRows:
        """Quantise and mask rows. Raises `NonFiniteError`: inf or nan among the rows; no pad was burnt."""
        mine = *self._before, pads.masks, len(pads.masks), *space.addresses
        done = self._encode(self._isa, inputs, *mine, 0, self.count)
        if done != self.count:
            raise MemoryError if done < 0 else NonFiniteError
        return mask(space.words, pads.pads, added=True)

    def decode(self, answer: Tensor, pads: PreparedPads, space: Space, outputs: Layout) -> bool:
        """Unmask and check an answer, int32 `[r, o]`, and write the results. Returns False if a row failed the check:
        the results must then not be used."""
        _, scales, expected = space.addresses
        opened = answer.data_ptr(), pads.effects, len(pads.effects), *self._check, expected, scales, *self._after
        if self._decode(self._isa, *opened, outputs, space.refused, 0, self.count) != self.count:
            raise MemoryError
        return not any(space.refused)

    def part(self, rows: FloatRows, space: Space, sent: MaskedRows) -> Part:
        """The part with which the usual way goes on."""
        rows.scale, expected = space.numbers[0], space.numbers[1].view(torch.int64)
        part = Part(self._plan, rows, 0, space.words, expected, sent.pads)
        part.sent = sent
        del part.encoded
        return part
