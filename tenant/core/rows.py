"""The rows of one product. They are encoded as integers before sending, and decoded from checked integers.

    FloatRows    float rows in, float rows out: activations or gradients of a model
    RingRows     integer rows in, integer rows out

Rows may each belong to one expert of a stack. They are then sorted by expert, `counts` says how many each expert has,
and every expert has its own V and its own channel scales.

The quantisation scale stays in these objects and never leaves the tenant (rule 5).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from symbiosis_priv.arithmetic import passes
from symbiosis_priv.arithmetic.modular import Column, dot
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts, check_counts, clip, segments
from symbiosis_priv.checkpoints.facts import GroupFacts
from tenant.core.pads import some_rows

Products = Column | Sequence[Column]
"""V of the matrix that all rows are multiplied by, or V of every expert's matrix."""

T = TypeVar("T", Tensor, Tensor | None)


class Rows(ABC):
    """`count` rows, at least one. Call `encode` first, with all rows; `decode` may be called with parts of them.

    Attributes:
        counts: rows of every expert of a stack; None if all rows are multiplied by the same matrix.
    """

    count: int
    counts: Counts | None = None

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
    ) -> bool:
        """Subtract effects from the answer to some rows, check the product, and write results.

        Args:
            start: index of the first of these rows.
            answer: int32 `[r, o]`; not changed.
            effects: int32 `[r, o]` each, to be subtracted.
            column: R, or None for no check.
            expected: int64 `[r]`, as `encode` set it for these rows.

        Returns:
            True if every row passed the check. Otherwise the results of all rows must be dropped.
        """

    def _segments(self, start: int, count: int) -> Iterable[tuple[int, slice]]:
        """The experts of some rows, each with its range of these rows. Without counts: one range."""
        return [(0, slice(0, count))] if self.counts is None else segments(clip(self.counts, start, count))


class FloatRows(Rows):
    """Float rows of one layer group.

    Args:
        facts: facts of the layer group.
        direction: forward or backward.
        inputs: float matrices `[r, w_k]` on the CPU, one dtype: the column blocks of the rows.
        outputs: float matrices for the column blocks of the results; overwritten.
        counts: as in `Rows`.

    Raises:
        RangeError: the counts are not those of these rows, or the group is no stack.
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
        self._facts, self._direction = facts.for_rows(counts), direction
        self._inputs, self._outputs = inputs, outputs
        if counts is not None:
            check_counts(counts, experts=facts.entry.experts, rows=self.count)

    def encode(self, out: Tensor, *, column: Products | None = None, expected: Tensor | None = None) -> None:
        forward = self._direction == FORWARD
        scales = [
            passes.encode(
                [_rows(part, rows) for part in self._inputs],
                bound=self._facts.bounds[self._direction],
                out=_rows(out, rows),
                # the weight scales belong to the gradient's columns, so they are multiplied before the rows are scaled
                fold=None if forward else self._of(expert, self._facts.channel_scale),
                column=_of_expert(expert, column),
                expected=None if expected is None else _rows(expected, rows),
            )
            for expert, rows in self._segments(0, self.count)
        ]
        self._scale = scales[0] if len(scales) == 1 else torch.cat(scales)

    def decode(
        self,
        start: int,
        answer: Tensor,
        *,
        effects: Sequence[Tensor] = (),
        column: Column | None = None,
        expected: Tensor | None = None,
    ) -> bool:
        forward = self._direction == FORWARD
        count = answer.shape[0]
        outputs = [some_rows(out, start, count) for out in self._outputs]
        scale = some_rows(self._scale, start, count)
        return all(
            passes.decode(
                _rows(answer, rows),
                [_rows(out, rows) for out in outputs],
                scale=_rows(scale, rows),
                effects=[_rows(effect, rows) for effect in effects],
                channel_scale=self._of(expert, self._facts.channel_scale) if forward else None,
                bias=self._of(expert, self._facts.bias) if forward else None,
                column=column,
                expected=None if expected is None else _rows(expected, rows),
            )
            for expert, rows in self._segments(start, count)
        )

    def _of(self, expert: int, values: T) -> T:
        """One expert's part of the channel scales or of the bias."""
        return values if self.counts is None or values is None else values[expert]


class RingRows(Rows):
    """Integer rows `[r, d]` whose true products fit int32. `product` `[r, o]` holds the checked products."""

    def __init__(self, rows: Tensor, *, outputs: int, counts: Counts | None = None) -> None:
        self.count, self.counts = len(rows), counts
        self._rows = rows
        self.product = torch.empty((self.count, outputs), dtype=torch.int32, device="cpu")

    def encode(self, out: Tensor, *, column: Products | None = None, expected: Tensor | None = None) -> None:
        out.copy_(self._rows)
        for expert, rows in self._segments(0, self.count):
            if (own := _of_expert(expert, column)) is not None and expected is not None:
                expected[rows] = dot(out[rows], own)

    def decode(
        self,
        start: int,
        answer: Tensor,
        *,
        effects: Sequence[Tensor] = (),
        column: Column | None = None,
        expected: Tensor | None = None,
    ) -> bool:
        product = passes.unmask(answer, effects=effects, column=column, expected=expected)
        if product is None:
            return False
        self.product[start : start + len(product)] = product
        return True


def _rows(matrix: Tensor, rows: slice) -> Tensor:
    return some_rows(matrix, rows.start, rows.stop - rows.start)


def _of_expert(expert: int, column: Products | None) -> Column | None:
    return column[expert] if isinstance(column, Sequence) else column
