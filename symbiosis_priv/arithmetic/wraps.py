"""Corrects wraps: entries of a product that left a narrow ring.

Theory of operation. With a ring of w < 32 bits, a provider's answer and the effects are known modulo 2^w. After
unmasking, the tenant has `y = t - 2^w k`, where t is the true product and k is zero nearly everywhere: rows are scaled
so that few entries leave the ring (`ring.Bound`), and then `|k_o| <= J` (`Bound.most_wraps`). The check of the product
knows `t @ R = xq @ V` modulo p = 2^61 - 1 for a secret column R, so the difference of both sides is

    c = t @ R - y @ R = 2^w (k @ R)      modulo p.

If one entry wrapped, c is one of the 2 J o residues `j 2^w R_o`. If two entries wrapped, c is the sum of two of these
residues. `Corrector` looks up both cases. It accepts a candidate only if a second, independent column agrees; that
column is used for nothing else.

Soundness. Let y be any vector of signed residues, made by a provider's error or not. The candidates are the vectors k
with at most two non-zero entries of at most J: fewer than `N = (2 J o + 1)^2 / 2 + 1`. For each of them with
`y + 2^w k != t`, the entries of the difference are below 2^33 < p, so a column accepts it with probability 2^-60 at
most (`modular.uniform`), and both columns with 2^-120. By the union bound, a wrong vector is accepted with probability
`N 2^-120`. With J <= 60 (d <= 2^21) and o <= 2^21, that is below 2^-65. For dense products of a stack of experts
(`tenant.core.verifier`) the columns give 2^-59 each, and together below 2^-63. So a corrected product is the true one,
as an accepted product is, and an error of a provider that looks like a wrap is corrected to the true product.

Which rows can be corrected is a function of t alone, up to that probability: those with at most two wrapped entries.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.modular import PRIME, Column, dot, shifted
from symbiosis_priv.limits import RingBits

MOST_ENTRIES = 2  # wrapped entries of a row that can be corrected

Check = tuple[Column, int]  # a secret column R, and the residue `t @ R`
Wrap = tuple[int, int]  # a wrapped entry and its k


def uncorrectable(products: Tensor, *, ring_bits: RingBits) -> list[int]:
    """The numbers of the rows of true products, int32 `[r, o]`, of which too many entries wrap to be corrected."""
    half = 1 << ring_bits - 1
    outside = (products < -half) | (products >= half)
    rows: list[int] = (outside.sum(dim=1) > MOST_ENTRIES).nonzero()[:, 0].tolist()
    return rows


class Corrector:
    """Corrects rows of products that are checked with the same column R, with a table of all wraps of one entry. `most`
    is J, the largest number of wraps |k| of an entry."""

    def __init__(self, column: Column, *, ring_bits: RingBits, most: int) -> None:
        self._column, self._bits, self._width = column, ring_bits, len(column.values)
        self._factors = torch.tensor([*range(-most, 0), *range(1, most + 1)], dtype=torch.int32, device="cpu")
        step = shifted(column.values, ring_bits)
        multiples = [step]
        for _ in range(most - 1):
            multiples.append((multiples[-1] + step).remainder_(PRIME))
        negative = [(PRIME - residues).remainder_(PRIME) for residues in reversed(multiples)]
        self._residues, self._places = torch.cat(negative + multiples).sort()

    def one_entry(self, y: Tensor, expected: Tensor) -> tuple[list[int], Tensor]:
        """Undo one wrap in every row of which one entry explains the difference. The second column must confirm it.
        `y` is int32 `[r, o]`, signed residues; `expected` is int64 `[r]`, the residues `t @ R`. Returns the numbers of
        these rows, and their true products: int32 `[n, o]`."""
        differences = (expected - dot(y, self._column)).remainder_(PRIME)
        found = torch.searchsorted(self._residues, differences).clamp_(max=len(self._residues) - 1)
        rows = (self._residues[found] == differences).nonzero()[:, 0]
        places, t = self._places[found[rows]], y[rows]
        wraps = self._factors[places // self._width] * (1 << self._bits)
        t[torch.arange(len(rows), dtype=torch.int64, device="cpu"), places % self._width] += wraps
        return rows.tolist(), t

    def corrected(self, y: Tensor, expected: int, second: Check) -> Tensor | None:
        """The true product of which y, int32 `[o]`, holds the signed residues; None if more than two entries wrapped.
        `expected` is the residue `t @ R`, and `second` an independent check. A search for two entries takes tens of
        milliseconds."""
        column, residue = second
        other = (residue - int(dot(y[None], column))) % PRIME
        for candidate in self._candidates((expected - int(dot(y[None], self._column))) % PRIME):
            if sum((k << self._bits) * int(column.values[entry]) for entry, k in candidate) % PRIME == other:
                t = y.clone()
                for entry, k in candidate:
                    t[entry] += k << self._bits
                return t
        return None

    def _candidates(self, difference: int) -> Iterator[list[Wrap]]:
        if not difference:
            yield []
            return
        first, end = (int(torch.searchsorted(self._residues, difference, right=right)) for right in (False, True))
        yield from ([self._at(place)] for place in range(first, end))
        yield from self._pairs(difference)

    def _pairs(self, difference: int) -> Iterator[list[Wrap]]:
        rest = (difference - self._residues).remainder_(PRIME)
        found = torch.searchsorted(self._residues, rest).clamp_(max=len(rest) - 1)
        for hit in (self._residues[found] == rest).nonzero()[:, 0].tolist():
            one, other = self._at(hit), self._at(int(found[hit]))
            if one[0] < other[0]:
                yield [one, other]

    def _at(self, place: int) -> Wrap:
        place = int(self._places[place])
        return place % self._width, int(self._factors[place // self._width])
