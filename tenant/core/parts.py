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

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from symbiosis_priv.arithmetic import passes
from symbiosis_priv.arithmetic.modular import PRIME, Column
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts, check_counts, clip, pick, segments
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.federation import Peer
from symbiosis_priv.limits import DEFAULT_RING_BITS, GroupIndex, RingBits
from symbiosis_priv.network import wire
from tenant.core.masked import MaskedRows, mask, remask
from tenant.core.pads import Pad, row_range, with_first_rows
from tenant.core.verifier import V


class UncheckedProduct(NamedTuple):
    """The product of some rows before unmasking and checking.

    Args:
        start: index of the first of these rows.
        answer: int32 `[r, o]`; not changed.
        effects: int32 `[r, o]` each, to be subtracted from the answer.
        column: R, or None for no check.
        expected: int64 `[r]`, R applied to the true product, as `Rows.encode` computes it.
        ring_bits: w, if answer and effects are residues modulo 2^w.
    """

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

    Attributes:
        counts: rows of every expert of a stack; None if all rows are multiplied by the same matrix.
        ring_bits: bits of the integers on the wire.
        most_wraps: J, the largest number of times that an entry of a product wraps around (`arithmetic.wraps`).
    """

    count: int
    counts: Counts | None = None
    ring_bits: RingBits
    most_wraps: int

    @abstractmethod
    def encode(self, out: Tensor, *, v: V | None = None, expected: Tensor | None = None) -> None:
        """Write all rows as integers.

        Args:
            out: int32 `[count, d]`; overwritten.
            v: V, one for every expert if there are counts; or None for no check.
            expected: int64 `[count]`; set to R applied to the true product, modulo p, if there is a V.

        Raises:
            NonFiniteError: inf or nan among the rows; nothing was sent.
        """

    @abstractmethod
    def decode(self, product: UncheckedProduct) -> list[int]:
        """Unmask the product of some rows, check it, and write results.

        Returns:
            The numbers of the rows, counted from `product.start`, that failed the check. Their results must be dropped.
        """

    @abstractmethod
    def selected(self, numbers: Sequence[int], *, halved: bool = False) -> Self:
        """Return a copy of some rows, with its own memory for results.

        Args:
            numbers: the rows, ascending.
            halved: encode them at half their scale, so that fewer entries of their products wrap around.

        Raises:
            RangeError: there is no smaller scale.
        """

    @abstractmethod
    def put(self, numbers: Sequence[int], source: Self, places: Sequence[int]) -> None:
        """Write the results of the rows `places` of `source` as the results of the rows `numbers`."""


class FloatRows(Rows):
    """Float rows of one layer group: activations or gradients.

    Args:
        inputs: float matrices `[r, w_k]` on the CPU, one dtype: the column blocks of the rows.
        outputs: float matrices for the column blocks of the results; overwritten.
        counts: as in `Rows`.

    Raises:
        RangeError: the counts are not those of these rows, or the group is not a stack.
    """

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
        if self.counts is None:
            return self._decode(product, outputs, scale, self.channel_scale, self.bias)
        wrong = list[int]()
        for expert, rows in segments(clip(self.counts, start, count)):
            factors, bias = _at(self.channel_scale, expert), _at(self.bias, expert)
            own = self._decode(product.rows(rows), [out[rows] for out in outputs], scale[rows], factors, bias)
            wrong += [rows.start + row for row in own]
        return wrong

    def _decode(
        self,
        product: UncheckedProduct,
        outputs: Sequence[Tensor],
        scale: Tensor,
        channel_scale: Tensor | None,
        bias: Tensor | None,
    ) -> list[int]:
        return passes.decode(
            product.answer,
            outputs,
            scale=scale,
            effects=product.effects,
            channel_scale=channel_scale,
            bias=bias,
            column=product.column,
            expected=product.expected,
            ring_bits=product.ring_bits,
        )

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
    """Return the values of one expert, or of some rows; None if there are none."""
    return None if values is None else values[place]


@dataclass(frozen=True, eq=False)
class Plan:
    """What all products of one layer group and direction have in common. Rows that each belong to one expert of a stack
    have a plan of their own.

    Args:
        index: index of the layer group.
        inputs, outputs: width of a row and of an answer's row.
        column: the secret column R.
        v: V, for each expert if rows belong to experts.
        second: returns another R and its V, which are read only for rows that fail the check in a narrow ring.
    """

    index: GroupIndex
    direction: Direction
    inputs: int
    outputs: int
    column: Column
    v: V
    second: Callable[[], tuple[Column, V]]


class Part:
    """The rows of one request, under pads that were burnt for them.

    Args:
        rows: all rows of the product.
        start: index of the part's first row in the product.
        encoded: int32 `[r, d]`, the part's rows in the ring, followed by rows of zeros if the bucket requires more
            rows.
        expected: int64 `[r]`, R applied to the true product of the rows.
        pads: pads for these rows; `UNMASKED_BY_CHOICE` without masking.
        counts: rows of every expert, zeros of the bucket included, if rows belong to experts of a stack.

    Attributes:
        index, direction, outputs: those of the plan.
        count: r. widest: the larger of d and `outputs`.
        size: bytes of rows and answer, 4 bytes per integer.
        sent: the masked rows, after `mask`.
        relayed: True if the executor has subtracted blocks from the latest answer.
        requests: the headers that were sent, by (executor, rows per request). A retry sends identical bytes, including
            the nonce (rule 3).
    """

    sent: MaskedRows
    relayed = False

    def __init__(
        self,
        plan: Plan,
        rows: Rows,
        start: int,
        encoded: Tensor,
        expected: Tensor,
        pads: Sequence[Pad],
        counts: Counts | None = None,
    ) -> None:
        self.plan, self.rows, self.start, self.encoded = plan, rows, start, encoded
        self.expected, self.pads, self.counts = expected, pads, counts
        self.index, self.direction, self.outputs = plan.index, plan.direction, plan.outputs
        self.count, width = encoded.shape
        self.widest = width if width > plan.outputs else plan.outputs
        self.size = 4 * self.count * (width + plan.outputs)
        self.requests: dict[tuple[Hashable, int], list[wire.Execute]] = {}

    @property
    def relayed_to(self) -> Peer | None:
        """The executor to which the effects of the first rows were relayed; None if they were not."""
        block = self.pads[0].shares[0].block if self.pads else None
        return block.executor if block is not None and self.pads[0].blocks() else None

    def rows_from(self, first: int, rows: int, pads: Sequence[Pad]) -> "Part":
        """Return `rows` rows of this part from `first` on, with pads for them, as a part of its own. Neither is masked
        yet."""
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

    def lacks_effects(self) -> bool:
        """Returns True if an effect has not arrived, or was relayed."""
        for pad in self.pads:
            for share in pad.shares:
                if share.effect.kept is None:  # without a lock, so it may arrive now
                    return True
        return False

    def open(self, answer: Tensor, *, relayed: bool = False) -> list[int]:
        """Subtract the effects from an answer, check it, and write the results.

        Args:
            answer: int32 `[r, o]`, an executor's answer. Changed only if it is relayed.
            relayed: True if the executor has subtracted blocks from the answer.

        Returns:
            The numbers of the rows that failed the check. Their results must be dropped.
        """
        self.relayed = relayed
        if relayed:
            for first, pad in with_first_rows(self.pads):
                pad.open_relayed(row_range(answer, first, pad.rows))
        refused = list[int]()
        for product in self.opened(answer):
            if wrong := self._check(product):
                first = product.start - self.start
                refused += [first + row for row in wrong]
        return refused

    def opened(self, answer: Tensor) -> list[UncheckedProduct]:
        """Return the unchecked product of each pad's rows."""
        column, bits = self.plan.column, self.rows.ring_bits
        if self.relayed or not self.pads:
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
