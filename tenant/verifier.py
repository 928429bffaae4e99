"""Freivalds' check in Z_2^32: every answer is the product of the pinned weights, or it is refused (DESIGN §4).

For a secret uniform matrix R (m columns) the tenant keeps `V = W.T @ R`. An answer y' to rows x' passes if
`y' @ R == x' @ V` mod 2^32, exactly. An error row with 2-adic valuation v survives m uniform columns with probability
2^-(32-v)m. The caller also checks that the *unmasked* product stays within the guard bits, which an error
of valuation 30 or 31 always violates; so a wrong answer passes with probability at most 2^-3m (m = 16: 2^-48),
whatever the rows are: the verdict tells a liar nothing about them. R is expanded from a 256-bit key over
the whole ring: small or sparse columns can be learned by probing.

Answers and effects are checked each for itself. Should the errors of several parties add up to one of valuation below
30, then one of them has such an error, and the columns refuse it. Whoever lies q times is believed once with
probability at most q * 2^-3m: a refusal says no more than that, for it looks the same whichever check has failed.
"""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.kernels import RingMatrix
from symbiosis_priv.keystream import SEED_BYTES, derive, expand
from symbiosis_priv.ring import DIRECTIONS, FORWARD, Direction

DEFAULT_COLUMNS = 16


class VerificationKeys:
    """R and V for every (layer group, direction). Secret: never sent, never logged; kept on disk with mode 0600."""

    def __init__(self, secret: bytes, *, columns: int) -> None:
        self._secret = secret
        self._columns = columns
        self._products: dict[tuple[int, str], Tensor] = {}
        self._matrices: dict[tuple[int, str], Tensor] = {}

    @classmethod
    def fresh(cls, *, columns: int) -> VerificationKeys:
        """New keys from the operating system's generator."""
        return cls(secrets.token_bytes(SEED_BYTES), columns=columns)

    def add(self, index: int, weight: Tensor, *, weight_bits: int) -> None:
        """Make the keys of one layer group from its quantised weight, int16 `[o, d]`."""
        matrix = RingMatrix(weight, weight_bits=weight_bits, kernel="int32")
        for direction in DIRECTIONS:
            forward = direction == FORWARD
            r = self._expand(index, direction, rows=weight.shape[0 if forward else 1])
            self._products[index, direction] = matrix.product(r.t(), transposed=forward).t()
            self._matrices[index, direction] = r

    def accepts(self, index: int, direction: Direction, *, rows: Tensor, answer: Tensor) -> bool:
        """Whether `answer` is the product of `rows` for this group and direction.

        Args:
            rows: int32 `[r, d]`, what was sent (or expanded from a seed).
            answer: int32 `[r, o]`, what came back.
        """
        r, v = self._matrices[index, direction], self._products[index, direction]
        if answer.dtype != torch.int32 or answer.shape != (rows.shape[0], r.shape[0]):
            return False
        return torch.equal(r.t() @ answer.t(), v.t() @ rows.t())  # 2 to 3 times as fast as `answer @ r` and `rows @ v`

    def to_tensors(self) -> dict[str, Tensor]:
        """For safetensors, on the tenant's own disk."""
        products = {f"{index}.{direction}": v.contiguous() for (index, direction), v in self._products.items()}
        return {"secret": torch.tensor(list(self._secret), dtype=torch.uint8, device="cpu"), **products}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], *, columns: int) -> VerificationKeys:
        """Inverse of `to_tensors`. V of one direction tells the height of the other direction's R."""
        keys = cls(bytes(tensors["secret"].tolist()), columns=columns)
        if len(keys._secret) != SEED_BYTES:
            raise CheckpointError("cached verification keys are damaged; delete them")
        for name, v in tensors.items():
            if name == "secret":
                continue
            index, _, direction = name.partition(".")
            other = next(d for d in DIRECTIONS if d != direction)
            height = tensors[f"{index}.{other}"].shape[0]
            keys._products[int(index), direction] = _by_column(v)
            keys._matrices[int(index), direction] = keys._expand(int(index), direction, rows=height)
        return keys

    def __repr__(self) -> str:
        return f"VerificationKeys({len(self._products)} products, {self._columns} columns)"

    def _expand(self, index: int, direction: str, *, rows: int) -> Tensor:
        key = derive(self._secret, "verify", str(index), direction)
        return _by_column(expand(key, first_row=0, rows=rows, width=self._columns))


def _by_column(matrix: Tensor) -> Tensor:
    """The same matrix, each column in one piece: how an integer product reads a skinny one fastest."""
    return matrix.t().contiguous().t()
