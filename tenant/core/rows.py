"""The rows of one product: encoded as integers on the way out, decoded from checked integers on the way back.

FloatRows    activations or gradients in, floats out: what a model sends
RingRows     integers in, integers out

The quantisation scale stays in these objects and never leaves the tenant (rule 5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from symbiosis_priv.arithmetic import passes
from symbiosis_priv.arithmetic.modular import Column, dot
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from tenant.core.facts import GroupFacts
from tenant.core.pads import some_rows


class Rows(ABC):
    """`count` rows, at least one. `encode` comes first and sees all of them; `decode` may see them in parts."""

    count: int

    @abstractmethod
    def encode(self, out: Tensor, *, column: Column | None = None, expected: Tensor | None = None) -> None:
        """Write all rows as integers.

        Args:
            out: int32 `[count, d]`; written.
            column: V, or None for no check.
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
            start: the first of them.
            answer: int32 `[r, o]`; not changed.
            effects: int32 `[r, o]` each, to be subtracted.
            column: R, or None for no check.
            expected: int64 `[r]`, as `encode` set it for these rows.

        Returns:
            Whether every row passed the check. If not, the results of all rows are to be dropped.
        """


class FloatRows(Rows):
    """Float rows of one layer group.

    Args:
        facts: of the layer group.
        direction: forward or backward.
        inputs: float matrices `[r, w_k]` on the CPU, one dtype, side by side.
        outputs: the same for the results; written.
    """

    def __init__(
        self, facts: GroupFacts, direction: Direction, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        self.count = inputs[0].shape[0]
        self._facts, self._direction = facts, direction
        self._inputs, self._outputs = inputs, outputs

    def encode(self, out: Tensor, *, column: Column | None = None, expected: Tensor | None = None) -> None:
        forward = self._direction == FORWARD
        self._scale = passes.encode(
            self._inputs,
            bound=self._facts.bounds[self._direction],
            out=out,
            # the weight scales belong to the gradient's columns, and must be in it before rows are scaled
            fold=None if forward else self._facts.channel_scale,
            column=column,
            expected=expected,
        )

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
        return passes.decode(
            answer,
            [some_rows(out, start, count) for out in self._outputs],
            scale=some_rows(self._scale, start, count),
            effects=effects,
            channel_scale=self._facts.channel_scale if forward else None,
            bias=self._facts.bias if forward else None,
            column=column,
            expected=expected,
        )


class RingRows(Rows):
    """Integer rows `[r, d]` whose true products fit int32. `product` `[r, o]` holds the checked products."""

    def __init__(self, rows: Tensor, *, outputs: int) -> None:
        self.count = len(rows)
        self._rows = rows
        self.product = torch.empty((self.count, outputs), dtype=torch.int32, device="cpu")

    def encode(self, out: Tensor, *, column: Column | None = None, expected: Tensor | None = None) -> None:
        out.copy_(self._rows)
        if column is not None and expected is not None:
            expected.copy_(dot(out, column))

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
