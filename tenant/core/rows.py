"""The rows of one product. They are encoded as integers before sending, and decoded from checked integers.

    FloatRows    float rows in, float rows out: activations or gradients of a model
    RingRows     integer rows in, integer rows out

The quantisation scale stays in these objects and never leaves the tenant (rule 5).
"""

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
    """`count` rows, at least one. Call `encode` first, with all rows; `decode` may be called with parts of them."""

    count: int

    @abstractmethod
    def encode(self, out: Tensor, *, column: Column | None = None, expected: Tensor | None = None) -> None:
        """Write all rows as integers.

        Args:
            out: int32 `[count, d]`; overwritten.
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
            start: index of the first of these rows.
            answer: int32 `[r, o]`; not changed.
            effects: int32 `[r, o]` each, to be subtracted.
            column: R, or None for no check.
            expected: int64 `[r]`, as `encode` set it for these rows.

        Returns:
            True if every row passed the check. Otherwise the results of all rows must be dropped.
        """


class FloatRows(Rows):
    """Float rows of one layer group.

    Args:
        facts: facts of the layer group.
        direction: forward or backward.
        inputs: float matrices `[r, w_k]` on the CPU, one dtype: the column blocks of the rows.
        outputs: float matrices for the column blocks of the results; overwritten.
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
            # the weight scales belong to the gradient's columns, so they are multiplied before the rows are scaled
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
