"""The rows of one product. `encode` makes integers of them, and `decode` unmasks and checks their product.

`decode` writes floats and the verdict in one pass (`arithmetic.passes`). The quantisation scale stays in these objects
and never leaves the tenant (rule 5).

Rows for the experts of a stack are sorted by expert, `counts` has the number of rows of each expert, and every expert
has its own V and channel scales.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from symbiosis_priv.arithmetic import passes
from symbiosis_priv.arithmetic.modular import Column
from symbiosis_priv.arithmetic.ring import FORWARD, Bound, Direction
from symbiosis_priv.arithmetic.segments import Counts, check_counts, clip, pick, segments
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.limits import DEFAULT_RING_BITS, RingBits
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

    def encode(self, out: Tensor, *, v: V | None = None, expected: Tensor | None = None) -> None:
        encode = partial(passes.encode, bound=self._bound)
        if self.counts is None:
            assert v is None or isinstance(v, Column)
            self._scale = encode(self._inputs, out=out, fold=self._fold, v=v, expected=expected)
            return
        scales = []
        for expert, rows in segments(self.counts):
            inputs, fold = [part[rows] for part in self._inputs], _at(self._fold, expert)
            own = v if v is None or isinstance(v, Column) else v[expert]
            scales.append(encode(inputs, out=out[rows], fold=fold, v=own, expected=_at(expected, rows)))
        self._scale = torch.cat(scales)

    def decode(self, product: UncheckedProduct) -> list[int]:
        start, count, outputs, scale = product.start, product.answer.shape[0], self._outputs, self._scale
        if count != self.count:
            outputs, scale = [out[start : start + count] for out in outputs], scale[start : start + count]
        parts = [(product, outputs, scale, self._channel_scale, self._bias)]
        if self.counts is not None:
            parts.clear()
            for expert, rows in segments(clip(self.counts, start, count)):
                factors, bias = _at(self._channel_scale, expert), _at(self._bias, expert)
                parts.append((product.rows(rows), [out[rows] for out in outputs], scale[rows], factors, bias))
        wrong = list[int]()
        for part, outputs, scale, factors, bias in parts:
            failed = passes.decode(
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
            wrong += [part.start - start + row for row in failed]
        return wrong

    def selected(self, numbers: Sequence[int], *, halved: bool = False) -> Self:
        copied = copy(self)
        copied.count, copied.counts = len(numbers), self.counts and pick(self.counts, numbers)
        copied._inputs = [part.detach()[numbers] for part in self._inputs]
        copied._outputs = [out.new_empty((copied.count, out.shape[1])) for out in self._outputs]
        if halved:
            copied._set_bound(self._bound.halved())
        return copied

    def put(self, numbers: Sequence[int], source: Self, places: Sequence[int]) -> None:
        for out, part in zip(self._outputs, source._outputs, strict=True):
            out[numbers] = part[places]

    def _set_bound(self, bound: Bound) -> None:
        self._bound, self.ring_bits, self.most_wraps = bound, bound.ring_bits, bound.most_wraps


def _at(values: Tensor | None, place: int | slice) -> Tensor | None:
    """Return the values of one expert, or of some rows; None if there are none."""
    return None if values is None else values[place]
