"""The rows of one product, and its parts: the rows of one request, masked before they are sent, checked before use.

The steps of a part, in this order:

    encode    makes integers of the rows (`Rows`)
    mask      adds pads to the encoded rows, once; the result is `MaskedRows`, which can be sent
    remask    only after a failure: replaces pads, so the masked rows change
    open      subtracts the effects from the answer and checks it; results of rows that fail are dropped
    put       only in a narrow ring: checks the corrected products of rows that failed, and writes their results

`Rows.decode` writes floats and the verdict in one pass (`arithmetic.passes`). The quantisation scale stays in these
objects and never leaves the tenant (rule 5). Rows for the experts of a stack are sorted by expert, `counts` has the
number of rows of each expert, and every expert has its own V and channel scales.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic import passes
from symbiosis_priv.arithmetic.modular import PRIME, Column
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts, check_counts, clip, pick, segments
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.errors import NonFiniteError
from symbiosis_priv.limits import DEFAULT_RING_BITS, GroupIndex, RingBits
from symbiosis_priv.native import array_of, pointer
from symbiosis_priv.network import wire
from tenant.core.masked import MaskedRows, mask, remask
from tenant.core.pads import Pad, row_range, with_first_rows
from tenant.core.verifier import V


class UncheckedProduct(NamedTuple):
    """The product of some rows before unmasking and checking. `answer`: int32 `[r, o]`; not changed. `effects`: int32
    `[r, o]` each, to be subtracted from the answer. `column`: R, or None for no check. `expected`: int64 `[r]`, R
    applied to the true product, as `Rows.encode` computes it. `ring_bits`: w; answer and effects are modulo 2^w."""

    start: int
    answer: Tensor
    effects: Sequence[Tensor] = ()
    column: Column | None = None
    expected: Tensor | None = None
    ring_bits: RingBits = DEFAULT_RING_BITS

    def rows(self, rows: slice) -> Self:
        """Return the product of some of these rows."""
        effects, expected = [effect[rows] for effect in self.effects], _at(self.expected, rows)
        start, answer = self.start + rows.start, self.answer[rows]
        return self._replace(start=start, answer=answer, effects=effects, expected=expected)

    def unmasked(self) -> tuple[Tensor, list[int]]:
        """Subtract the effects. Returns int32 `[r, o]`, and the numbers of the rows that fail the check."""
        unmasked = passes.unmask(self.answer, self.effects, ring_bits=self.ring_bits)
        if self.column is None or self.expected is None:
            return unmasked, []
        return unmasked, passes.refused(unmasked, self.column, self.expected)


class Rows(ABC):
    """`count` rows, at least one. Call `encode` first, with all rows; `decode` may be called with parts of them.
    `counts`: rows of every expert of a stack; None if all rows are multiplied by the same matrix. `ring_bits`: bits of
    the integers on the wire. `most_wraps`: J, how often an entry of a product wraps at most (`arithmetic.wraps`)."""

    count: int
    counts: Counts | None = None
    ring_bits: RingBits
    most_wraps: int

    @abstractmethod
    def encode(self, out: Tensor, *, v: V | None = None, expected: Tensor | None = None) -> None:
        """Write all rows as integers to `out`, int32 `[count, d]`. `v`: V, one for every expert if there are counts; or
        None for no check. `expected`: int64 `[count]`; set to R applied to the true product, modulo p, if there is a V.
        Raises `NonFiniteError`: inf or nan among the rows; nothing was sent."""

    @abstractmethod
    def decode(self, product: UncheckedProduct) -> list[int]:
        """Unmask the product of some rows, check it, and write results. Returns the numbers of the rows, counted from
        `product.start`, that failed the check. Their results must be dropped."""

    @abstractmethod
    def selected(self, numbers: Sequence[int], *, halved: bool = False) -> Self:
        """Return a copy of some rows, with its own memory for results. `numbers`: the rows, ascending. `halved`: encode
        them at half their scale, so that fewer entries of their products wrap around. Raises `RangeError`: there is no
        smaller scale."""

    @abstractmethod
    def put(self, numbers: Sequence[int], source: Self, places: Sequence[int]) -> None:
        """Write the results of the rows `places` of `source` as the results of the rows `numbers`."""


class FloatRows(Rows):
    """Float rows of one layer group: activations or gradients. `inputs`: the column blocks of the rows, float matrices
    `[r, w_k]` on the CPU, one dtype. `outputs`: float matrices for those of the results; overwritten. Raises
    `RangeError`: the counts are not those of these rows, or the group is not a stack."""

    def __init__(
        self,
        facts: GroupFacts,
        direction: Direction,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        counts: Counts | None = None,
    ) -> None:
        self.count, self.counts = inputs[0].shape[0], counts
        self.inputs, self.outputs = inputs, outputs
        if counts is not None:
            facts, experts = facts.for_rows(counts), facts.entry.experts
            check_counts(counts, experts=experts, rows=self.count)
        # the weight scales belong to the gradient's columns, so backward they are multiplied before the rows are scaled
        forward = direction == FORWARD
        self.fold = None if forward else facts.channel_scale
        self.channel_scale = facts.channel_scale if forward else None
        self.bias = facts.bias if forward else None
        self.bound = bound = facts.bounds[direction]
        self.ring_bits, self.most_wraps = bound.ring_bits, bound.most_wraps

    def encode(self, out: Tensor, *, v: V | None = None, expected: Tensor | None = None) -> None:
        if self.counts is None:
            assert v is None or isinstance(v, Column)
            self.scale = passes.encode(self.inputs, bound=self.bound, out=out, fold=self.fold, v=v, expected=expected)
            return
        scales = []
        for expert, rows in segments(self.counts):
            inputs, fold = [part[rows] for part in self.inputs], _at(self.fold, expert)
            own = v if v is None or isinstance(v, Column) else v[expert]
            mine = _at(expected, rows)
            scales.append(passes.encode(inputs, bound=self.bound, out=out[rows], fold=fold, v=own, expected=mine))
        self.scale = torch.cat(scales)

    def decode(self, product: UncheckedProduct) -> list[int]:
        start, count, outputs, scale = product.start, product.answer.shape[0], self.outputs, self.scale
        if count != self.count:
            outputs, scale = [out[start : start + count] for out in outputs], scale[start : start + count]
        parts = [(product, outputs, scale, self.channel_scale, self.bias)]
        if self.counts is not None:
            parts.clear()
            for expert, rows in segments(clip(self.counts, start, count)):
                factors, bias = _at(self.channel_scale, expert), _at(self.bias, expert)
                parts.append((product.rows(rows), [out[rows] for out in outputs], scale[rows], factors, bias))
        wrong = list[int]()
        for part, outputs, scale, factors, bias in parts:
            own = passes.decode(
                part.answer,
                outputs,
                scale=scale,
                effects=part.effects,
                channel_scale=factors,
                bias=bias,
                column=part.column,
                expected=part.expected,
                ring_bits=part.ring_bits,
            )
            wrong += [part.start - start + row for row in own]
        return wrong

    def selected(self, numbers: Sequence[int], *, halved: bool = False) -> Self:
        copied = copy(self)
        copied.count, copied.counts = len(numbers), self.counts and pick(self.counts, numbers)
        copied.inputs = [part.detach()[numbers] for part in self.inputs]
        copied.outputs = [out.new_empty((copied.count, out.shape[1])) for out in self.outputs]
        if halved:
            copied.bound = bound = self.bound.halved()
            copied.ring_bits, copied.most_wraps = bound.ring_bits, bound.most_wraps
        return copied

    def put(self, numbers: Sequence[int], source: Self, places: Sequence[int]) -> None:
        for out, part in zip(self.outputs, source.outputs, strict=True):
            out[numbers] = part[places]


def _at(values: Tensor | None, place: int | slice) -> Tensor | None:
    return None if values is None else values[place]


@dataclass(frozen=True, eq=False)
class Plan:
    """What all products of one layer group and direction have in common. Rows that each belong to one expert of a stack
    have a plan of their own."""

    index: GroupIndex
    direction: Direction
    inputs: int  # width of a row
    outputs: int  # width of an answer's row
    column: Column  # R
    v: V
    second: Callable[[], tuple[Column, V]]  # another R and V, which are read only for rows that fail in a narrow ring


@dataclass(eq=False)
class Part:
    """The rows of one request, under pads that were burnt for them. `index`, `direction`, `outputs`: those of the plan.
    `count`: r. `widest`: the larger of d and `outputs`. `size`: bytes of rows and answer, 4 bytes per integer."""

    plan: Plan
    rows: Rows  # of the product
    start: int  # of the part in the product
    encoded: Tensor  # int32 `[r, d]`, followed by rows of zeros if the bucket requires more rows
    expected: Tensor  # int64 `[r]`, R applied to the true product of the rows
    pads: Sequence[Pad]  # for these rows; `UNMASKED_BY_CHOICE` without masking
    counts: Counts | None = None  # rows of every expert, if rows belong to experts of a stack
    sent: MaskedRows = field(init=False)  # after `mask`
    # the headers that were sent, by (executor, rows per request): a retry sends identical bytes (rule 3)
    requests: dict[tuple[Hashable, int], list[wire.Execute]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.index, self.direction, self.outputs = self.plan.index, self.plan.direction, self.plan.outputs
        self.count, width = self.encoded.shape
        self.widest, self.size = max(width, self.outputs), 4 * self.count * (width + self.outputs)

    def rows_from(self, first: int, rows: int, pads: Sequence[Pad]) -> "Part":
        """Return `rows` rows from `first` on, with pads for them, as a part of its own. Neither is masked yet."""
        encoded, expected = row_range(self.encoded, first, rows), row_range(self.expected, first, rows)
        counts = self.counts_of(first, rows)
        return Part(self.plan, self.rows, self.start + first, encoded, expected, pads, counts)

    def mask(self) -> None:
        """Mask the rows (`masked.mask`). Afterwards the part holds no unmasked rows."""
        self.sent = mask(self.encoded, self.pads)
        del self.encoded

    @property
    def is_masked(self) -> bool:
        """True after `mask`."""
        return "sent" in vars(self)

    def counts_of(self, first: int, rows: int) -> Counts | None:
        """Return the counts of some rows of this part."""
        return None if self.counts is None else clip(self.counts, first, rows)

    def remask(self, fresh: Mapping[int, Pad]) -> None:
        """Replace pads, by their index (`masked.remask`), and forget the requests that were sent under the old ones."""
        self.sent = remask(self.sent, fresh)
        self.pads = self.sent.pads
        self.requests.clear()

    def open(self, answer: Tensor) -> list[int]:
        """Subtract the effects from an answer, int32 `[r, o]`, check it, and write the results. The answer does not
        change. Returns the numbers of the rows that failed the check. Their results must be dropped."""
        refused = list[int]()
        for product in self.opened(answer):
            if wrong := self._check(product):
                first = product.start - self.start
                refused += [first + row for row in wrong]
        return refused

    def opened(self, answer: Tensor) -> list[UncheckedProduct]:
        """Return the unchecked product of each pad's rows."""
        column, bits = self.plan.column, self.rows.ring_bits
        if not self.pads:
            return [UncheckedProduct(self.start, answer, (), column, self.expected, bits)]
        found = []
        for first, pad in with_first_rows(self.pads):
            expected, correction = row_range(self.expected, first, pad.rows), pad.correction()
            if correction is not None:  # another pad brings another one, so `self.expected` stays that of the rows
                expected = (expected + correction).remainder_(PRIME)
            own, effects = pad.open(row_range(answer, first, pad.rows))
            found.append(UncheckedProduct(self.start + first, own, effects, column, expected, bits))
        return found

    def put(self, rows: Sequence[int], some: Rows, products: Tensor) -> list[int]:
        """Check products of rows, int32 `[n, o]`, and write the results of those that pass. Returns the others."""
        product = UncheckedProduct(0, products, column=self.plan.column, expected=self.expected[list(rows)])
        wrong = set(some.decode(product))
        right = [place for place in range(len(rows)) if place not in wrong]
        self.rows.put([self.start + rows[place] for place in right], some, right)
        return [rows[place] for place in sorted(wrong)]

    def _check(self, product: UncheckedProduct) -> list[int]:
        count, left = product.answer.shape[0], self.rows.count - product.start
        if left >= count:
            return self.rows.decode(product)
        # rows of zeros are checked like other rows, so that no provider can tell them apart
        real = max(0, left)
        wrong = self.rows.decode(product.rows(slice(0, real))) if real else []
        _, zeros = product.rows(slice(real, count)).unmasked()
        return wrong + [real + row for row in zeros]


MOST_FEW = 16
"""Largest number of rows of `FewRows`."""

Layout = ctypes.Array[ctypes.c_int64]
"""Addresses, or the column blocks of a matrix (`native.layout`)."""
Places = tuple[Layout, Layout]
"""Where the rows of a product are read, and where its results are written."""


class Space(NamedTuple):
    """Memory for one product of `FewRows`: `words` int32 `[r, d]`, `answer` int32 `[r, o]`, a flag for each row, and
    `numbers` float64 `[2, r]`: the rows' scales, and the bits of R applied to their true product, int64."""

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
    direction of `like`, a part of float rows for one matrix, with all rows of its product. `space` and `prepared`
    prepare the rest while another answer is awaited. The steps and their order are those of `Part`, and a pad is burnt
    before its rows become `MaskedRows`. Whenever anything is unusual, `part` makes the `Part` with which the usual way
    goes on: the same integers, pads, masked rows."""

    def __init__(self, like: Part) -> None:
        plan, rows, compiled = like.plan, like.rows, native.compiled(brief=like.count * like.widest <= passes.BRIEF)
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
