"""Freivalds' check over the integers: a row is used only if it is the product of the pinned weights.

For a secret column R of residues modulo p = 2^61 - 1 the tenant keeps `V = W.T @ R` mod p. After the effects are
subtracted, a row y is read as signed integers and accepted if and only if `y @ R == xq @ V` mod p. Both sides are inner
products with R: of y, and of the true product t, whose entries are in the range of int32 (`ring`). If y is not t, then
y - t is a non-zero vector with entries of at most 2^32 < p, and R maps it to 0 with probability at most 2^-60
(`modular.uniform`). This holds for every error, for every 2-adic valuation, and also for errors that wrap around,
because 2^32 is not a multiple of p. The check takes no bits of the range, one column is enough, and one check covers
the answer and all effects.

The verdict depends on the error y - t alone, never on the rows. One of q wrong answers of a provider passes with
probability at most q * 2^-60, because a refusal reveals nothing about R except that this error was detected.

In a narrow ring, a second, independent set of keys (`Preparation.second`) confirms corrections (`arithmetic.wraps`).
"""

import functools
import secrets
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import SEED_BYTES, StreamKey, derive
from symbiosis_priv.arithmetic.modular import PRIME, Column, multiply, uniform, weigh
from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction, opposite
from symbiosis_priv.limits import GroupIndex

Place = tuple[GroupIndex, Direction]
"""The place of a key: a layer group, and the direction of the product."""
V = Column | Sequence[Column]
"""V of the matrix that all rows are multiplied by, or V of every expert's matrix."""


class VerificationKeys(dict[Place, tuple[Column, Column]]):
    """R and V modulo p for every (layer group, direction). Secret: never sent, never logged; on disk with mode 0600.
    `keys[index, direction]` is (R, V) for rows that are multiplied by the whole matrix, made at the first look-up.
    `secret`: 32 bytes, from which R is expanded. `products`: V, int64 `[w]`, where rows have width w. For a stack of
    experts, in the direction in which results have the width of one expert: V of every expert, int64 `[experts, w]`."""

    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self.secret = secret
        self.products: dict[Place, Tensor] = {}
        self._of_one_matrix: dict[Place, Column] = {}

    @classmethod
    def fresh(cls) -> Self:
        """New keys from the operating system's generator."""
        return cls(secrets.token_bytes(SEED_BYTES))

    def add(self, index: GroupIndex, weight: Tensor) -> None:
        """Make the keys of one linear from its quantised weight, int16 `[o, d]`."""
        outputs, inputs = weight.shape
        forward, backward = self._uniform(index, FORWARD, outputs), self._uniform(index, BACKWARD, inputs)
        self.products[index, FORWARD], self.products[index, BACKWARD] = weigh(weight, forward, backward)

    def add_stack(self, index: GroupIndex, weight: Tensor, *, experts: int, transposed: bool) -> None:
        """Make the keys of a stack from its dense quantised weight, int16 `[o, d]`; `transposed` as in the manifest."""
        if transposed:
            weight = weight.t().contiguous()
        # results have the width of one expert, rows have the width of the stack
        across: Direction = BACKWARD if transposed else FORWARD
        along = opposite(across)
        height, width = len(weight) // experts, weight.shape[1]
        shared, other = self._uniform(index, across, height), self._uniform(index, along, width)
        down, up = zip(*[weigh(matrix, shared, other) for matrix in weight.split(height)], strict=True)
        self.products[index, across], self.products[index, along] = torch.stack(down), torch.cat(up)

    def __missing__(self, place: Place) -> tuple[Column, Column]:
        """Make (R, V) for rows that are multiplied by the whole matrix. Errors of a dense product of a stack are (e_1
        ... e_E), one part per expert. They are checked with the columns a_k R, a_k secret and uniform, and V = sum a_k
        V_k: `sum a_k (e_k @ R)` is 0 only if every e_k @ R is (2^-60, for one e_k that is not 0) or if some a_k has the
        one residue that cancels the rest (2^-60), so with 2^-59 at most. In the other direction the experts' rows are
        joined, W R holds every V_k already, and one column serves both."""
        (index, direction), v = place, self.products[place]
        r = self._r(index, direction)
        if v.dim() == 2:
            key = derive(self.secret, "check experts", str(index), direction)
            factors = uniform(StreamKey(key), len(v)).values[:, None]
            r = Column(multiply(factors, r.values).reshape(-1))
            v = functools.reduce(lambda a, b: (a + b).remainder(PRIME), multiply(factors, v))
        self[place] = r, Column(v)
        return self[place]

    def expert_columns(self, index: GroupIndex, direction: Direction) -> tuple[Column, Sequence[Column]]:
        """Return R, and V of every expert of a stack, for rows that each belong to one expert. A row for expert k is
        checked with R, which all experts of the stack share, and `V_k = W_k.T @ R`. That is as sound as an R for each
        expert: a uniform R passes a non-zero error y - t with probability at most 2^-60, whichever matrix t came from.
        """
        v = self.products[index, direction]
        if v.dim() == 1:
            v = v.view(len(self.products[index, opposite(direction)]), -1)
        return self._r(index, direction), [Column(values) for values in v]

    def for_rows(self, index: GroupIndex, direction: Direction, *, by_expert: bool) -> tuple[Column, V]:
        """`expert_columns` for rows that each belong to one expert of a stack, `self[index, direction]` for others."""
        return self.expert_columns(index, direction) if by_expert else self[index, direction]

    def __repr__(self) -> str:
        return f"VerificationKeys({len(self.products)} products)"

    def _r(self, index: GroupIndex, direction: Direction) -> Column:
        """R for results of one matrix: of a linear, or of every expert of a stack. It is made once."""
        if (found := self._of_one_matrix.get((index, direction))) is None:
            v, other = self.products[index, direction], self.products[index, opposite(direction)]
            height = other.shape[-1] // (len(v) if v.dim() == 2 else 1)
            found = self._of_one_matrix[index, direction] = self._uniform(index, direction, height)
        return found

    def _uniform(self, index: GroupIndex, direction: Direction, height: int) -> Column:
        return uniform(StreamKey(derive(self.secret, "check", str(index), direction)), height)
