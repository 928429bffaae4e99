"""The rows of one product. They are encoded as integers before sending, and decoded from checked integers.

    FloatRows    float rows in, float rows out: activations or gradients of a model
    RingRows     integer rows in, integer rows out

Rows may each belong to one expert of a stack. They are then sorted by expert, `counts` says how many each expert has,
and every expert has its own V and its own channel scales.

The quantisation scale stays in these objects and never leaves the tenant (rule 5).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Self

import torch
from torch import Tensor

from symbiosis_priv.arithmetic import passes
from symbiosis_priv.arithmetic.modular import Column, dot
from symbiosis_priv.arithmetic.ring import FORWARD, Bound, Direction
from symbiosis_priv.arithmetic.segments import Counts, check_counts, clip, segments
from symbiosis_priv.checkpoints.facts import GroupFacts
from symbiosis_priv.errors import RangeError
from symbiosis_priv.limits import DEFAULT_RING_BITS, RingBits

Products = Column | Sequence[Column]
"""V of the matrix that all rows are multiplied by, or V of every expert's matrix."""


class Rows(ABC):
    """`count` rows, at least one. Call `encode` first, with all rows; `decode` may be called with parts of them.

    Attributes:
        counts: rows of every expert of a stack; None if all rows are multiplied by the same matrix.
        ring_bits: bits of the integers that travel.
        most_wraps: J, the largest number of times that an entry of a product wraps around (`arithmetic.wraps`).
    """

    count: int
    counts: Counts | None = None
    ring_bits: RingBits
    most_wraps: int

    @abstractmethod
    def encode(self, out: Tensor, *, column: Products | None = None, expected: Tensor | None = None) -> None:
        """Write all rows as integers.

        Args:
            out: int32 `[count, d]`; overwritten.
            column: V, one for every expert if there are counts; or None for no check.
            expected: int64 `[count]`; set to R applied to the true product, modulo p, if there is a column.

        Raises:
            NonFiniteError: inf or nan among the rows; nothing was sent.
        """

    @abstractmethod
    def decode(
        self,
        start: int,
        answer: Tensor,
        *,
        effects: Sequence[Tensor] = (),
        column: Column | None = None,
        expected: Tensor | None = None,
        ring_bits: RingBits = DEFAULT_RING_BITS,
    ) -> list[int]:
        """Subtract effects from the answer to some rows, check the product, and write results.

        Args:
            start: index of the first of these rows.
            answer: int32 `[r, o]`; not changed.
            effects: int32 `[r, o]` each, to be subtracted.
            column: R, or None for no check.
            expected: int64 `[r]`, as `encode` set it for these rows.
            ring_bits: bits of the answer and the effects that count.

        Returns:
            The numbers of the rows, counted from `start`, that failed the check. Their results must be dropped.
        """

    @abstractmethod
    def some(self, numbers: Sequence[int], *, halved: bool = False) -> Self:
        """Copy rows, with results of their own.

        Args:
            numbers: the rows, ascending.
            halved: encode them at half their scale, so that fewer entries of their products wrap around.

        Raises:
            RangeError: there is no smaller scale.
        """

    @abstractmethod
    def put(self, numbers: Sequence[int], some: Self) -> None:
        """Write the results of `some(numbers)`."""

    def _counts_of(self, numbers: Sequence[int]) -> Counts | None:
        if self.counts is None:
            return None
        ends = torch.tensor(self.counts, dtype=torch.int64, device="cpu").cumsum(0)
        experts = torch.searchsorted(ends, torch.tensor(numbers, dtype=torch.int64, device="cpu"), right=True)
        return tuple(torch.bincount(experts, minlength=len(self.counts)).tolist())


class FloatRows(Rows):
    """Float rows of one layer group.

    Args:
        facts: facts of the layer group.
        direction: forward or backward.
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
        self._inputs, self._outputs = inputs, outputs
        if counts is not None:
            facts, experts = facts.for_rows(counts), facts.entry.experts
            check_counts(counts, experts=experts, rows=self.count)
        # the weight scales belong to the gradient's columns, so backward they are multiplied before the rows are scaled
        forward = direction == FORWARD
        self._fold = None if forward else facts.channel_scale
        self._channel_scale = facts.channel_scale if forward else None
        self._bias = facts.bias if forward else None
        self._set_bound(facts.bounds[direction])

    def encode(self, out: Tensor, *, column: Products | None = None, expected: Tensor | None = None) -> None:
        encode = partial(passes.encode, bound=self._bound)
        if self.counts is None:
            assert column is None or isinstance(column, Column)
            self._scale = encode(self._inputs, out=out, fold=self._fold, column=column, expected=expected)
            return
        scales = []
        for expert, rows in segments(self.counts):
            own = column if column is None or isinstance(column, Column) else column[expert]
            mine = None if expected is None else expected[rows]
            inputs, fold = [part[rows] for part in self._inputs], _of_expert(self._fold, expert)
            scales.append(encode(inputs, out=out[rows], fold=fold, column=own, expected=mine))
        self._scale = torch.cat(scales)

    def decode(
        self,
        start: int,
        answer: Tensor,
        *,
        effects: Sequence[Tensor] = (),
        column: Column | None = None,
        expected: Tensor | None = None,
        ring_bits: RingBits = DEFAULT_RING_BITS,
    ) -> list[int]:
        decode = partial(passes.decode, column=column, ring_bits=ring_bits)
        count, outputs, scale = answer.shape[0], self._outputs, self._scale
        if count != self.count:
            outputs, scale = [out[start : start + count] for out in outputs], scale[start : start + count]
        factors, bias = self._channel_scale, self._bias
        if self.counts is None:
            return decode(
                answer, outputs, scale=scale, effects=effects, channel_scale=factors, bias=bias, expected=expected
            )
        wrong = list[int]()
        for expert, rows in segments(clip(self.counts, start, count)):
            failed = decode(
                answer[rows],
                [out[rows] for out in outputs],
                scale=scale[rows],
                effects=[effect[rows] for effect in effects],
                channel_scale=_of_expert(factors, expert),
                bias=_of_expert(bias, expert),
                expected=None if expected is None else expected[rows],
            )
            wrong += [rows.start + row for row in failed]
        return wrong

    def some(self, numbers: Sequence[int], *, halved: bool = False) -> Self:
        some = copy(self)
        some.count, some.counts = len(numbers), self._counts_of(numbers)
        some._inputs = [part.detach()[numbers] for part in self._inputs]
        some._outputs = [out.new_empty((some.count, out.shape[1])) for out in self._outputs]
        if halved:
            some._set_bound(self._bound.halved())
        return some

    def put(self, numbers: Sequence[int], some: Self) -> None:
        for out, part in zip(self._outputs, some._outputs, strict=True):
            out[numbers] = part

    def _set_bound(self, bound: Bound) -> None:
        self._bound, self.ring_bits, self.most_wraps = bound, bound.ring_bits, bound.most_wraps


class RingRows(Rows):
    """Integer rows `[r, d]` whose true products fit int32. `product` `[r, o]` holds the checked products.

    In a narrow ring, two entries of a product may leave the ring once.
    """

    def __init__(
        self,
        rows: Tensor,
        *,
        outputs: int,
        counts: Counts | None = None,
        ring_bits: RingBits = DEFAULT_RING_BITS,
    ) -> None:
        self.count, self.counts, self.ring_bits = len(rows), counts, ring_bits
        self.most_wraps = int(ring_bits < DEFAULT_RING_BITS)
        self._rows = rows
        self.product = torch.empty((self.count, outputs), dtype=torch.int32, device="cpu")

    def encode(self, out: Tensor, *, column: Products | None = None, expected: Tensor | None = None) -> None:
        out.copy_(self._rows)
        if column is None or expected is None:
            return
        if isinstance(column, Column):
            expected[:] = dot(out, column)
            return
        assert self.counts is not None
        for expert, rows in segments(self.counts):
            expected[rows] = dot(out[rows], column[expert])

    def decode(
        self,
        start: int,
        answer: Tensor,
        *,
        effects: Sequence[Tensor] = (),
        column: Column | None = None,
        expected: Tensor | None = None,
        ring_bits: RingBits = DEFAULT_RING_BITS,
    ) -> list[int]:
        product = passes.unmask(answer, effects, ring_bits=ring_bits)
        self.product[start : start + len(product)] = product
        return [] if column is None or expected is None else passes.refused(product, column, expected)

    def some(self, numbers: Sequence[int], *, halved: bool = False) -> Self:
        if halved:
            raise RangeError(f"integer rows of which more than two products leave a ring of {self.ring_bits} bits")
        some = copy(self)
        some.count, some.counts = len(numbers), self._counts_of(numbers)
        some._rows, some.product = self._rows[numbers], self.product[numbers]
        return some

    def put(self, numbers: Sequence[int], some: Self) -> None:
        self.product[numbers] = some.product


def _of_expert(values: Tensor | None, expert: int) -> Tensor | None:
    """One expert's part of the channel scales or of the bias."""
    return None if values is None else values[expert]
