"""The masks of `masking = "lwe"` on many rows that the adversary has chosen, without and with planted faults.

The adversary chooses two rows: zeros, and a row with large entries. For each of `ROWS` requests a coin decides which
row is masked, by the tenant's own code. The adversary knows P and the first half of the coins, and guesses the others.
A sound mask leaves every guess at chance. Each attack also plays against a planted fault, and must win. A hint that
does not belong to the weights is a fault of verification: `tests/tenant/masking/test_lwe.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from symbiosis_priv.arithmetic import lattice
from symbiosis_priv.arithmetic.keystream import Keystream, StreamKey, expand, random_key
from symbiosis_priv.arithmetic.lattice import HEIGHT, NOISE_WORDS, WORDS, Panels
from symbiosis_priv.arithmetic.modular import uniform
from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.limits import GroupIndex
from tenant.masking.lwe import LweRows
from tenant.preparation.hints import Hint
from threat_model.attacks.base import Outcome, Trial
from threat_model.evidence.statistics import binomial_tail

ROWS: Final = 100_000
_STEP: Final = 5_000
_NARROW, _WIDE, _FEW_ROWS = (
    64,
    HEIGHT + 512,
    4_000,
)  # a mask without e is confined to a subspace if rows are wider than P
_SHIFT: Final = 12


class _Play(NamedTuple):
    """The adversary's view: P, both rows `[2, d]`, the masked rows `[n, d]`, and the coins of the first half."""

    matrix: Panels
    chosen: Tensor
    masked: Tensor
    coins: Tensor


def play_masks(rows: int = ROWS) -> Iterator[Trial]:
    """Play every attack without a fault, and with the fault that it must find."""
    for name, attack, width, fault, planting in (
        ("bits of entries", _bits, _NARROW, f"P is a multiple of 2^{_SHIFT}", _multiple),
        ("rows near known rows", _near_known_rows, _NARROW, "c is used twice", _one_secret),
        ("low bits", _low_bits, _NARROW, f"P is a multiple of 2^{_SHIFT}", _multiple),
        ("subspace of P", _subspace, _WIDE, "e is left out", _no_errors),
    ):
        count = rows if width == _NARROW else min(rows, _FEW_ROWS)
        yield Trial((name, "none"), False, _outcome(attack, count, width))
        with planting():
            yield Trial((name, fault), True, _outcome(attack, count, width))


class _Hints:
    """The tenant's P, and a hint that is not used."""

    def __init__(self, width: int) -> None:
        self._matrix = lattice.uniform(random_key(), width)

    def matrix(self, width: int) -> Panels:
        return self._matrix

    def hint(self, *place: object) -> Hint:
        return Hint(Panels.empty(1, bits=16), torch.zeros(HEIGHT, dtype=torch.int64))


def _outcome(attack: Callable[[_Play], Tensor], rows: int, width: int) -> Outcome:
    hints, half = _Hints(width), rows // 2
    chosen = torch.zeros((2, width), dtype=torch.int32)
    chosen[1] = expand(random_key(), first_row=0, rows=1, width=width)[0] >> 11  # as large as rows of real layers
    coins = expand(random_key(), first_row=0, rows=rows, width=1)[:, 0] < 0
    streams = Keystream(random_key(), width=WORDS), Keystream(random_key(), width=NOISE_WORDS * width)
    v, masked = uniform(random_key(), width), chosen[coins.long()]
    for start in range(0, rows, _STEP):
        piece = masked[start : start + _STEP]
        made = LweRows((GroupIndex(0), FORWARD), start, len(piece), hints, streams, v)  # type: ignore[arg-type]
        made.add_to(piece, first_row=start)
    guessed = attack(_Play(hints.matrix(width), chosen, masked, coins[:half]))
    hits = int((guessed == coins[half:]).sum())
    return Outcome(hits, rows - half, 0.5, binomial_tail(hits, rows - half, 0.5))


# Attacks: guesses of the second half of the coins


def _bits(play: _Play) -> Tensor:
    """Weighs every bit of 16 entries by how much its frequency differs between the two rows."""
    bits = (play.masked[:, :16, None] >> torch.arange(32, dtype=torch.int32) & 1).flatten(1).float()
    known, unknown = bits[: len(play.coins)], bits[len(play.coins) :]
    one, zero = known[play.coins].mean(0), known[~play.coins].mean(0)
    weights = one - zero
    return unknown @ weights > (one + zero) @ weights / 2  # halfway, whatever the shares of the two rows are


def _near_known_rows(play: _Play) -> Tensor:
    """Compares with known rows of either kind: masks that share c differ by small numbers."""
    half = len(play.coins)
    nearest = []
    for kind in (False, True):
        known = play.masked[:half][play.coins == kind][:4]
        distances = [(play.masked[half:] - one).double().abs().sum(1) for one in known]
        nearest.append(torch.stack(distances).amin(0))
    return nearest[1] < nearest[0]


def _low_bits(play: _Play) -> Tensor:
    """Compares the lowest bits of entries with those of both rows, for as many bits as fit the known coins best."""
    half, best = len(play.coins), (0.0, torch.empty(0))
    for bits in (1, 4, 8, _SHIFT, 16, 24):
        shifted = [(play.masked - row << 32 - bits).double().abs().sum(1) for row in play.chosen]
        guessed = shifted[1] < shifted[0]
        best = max(
            best, (float((guessed[:half] == play.coins).double().mean()), guessed[half:]), key=lambda one: one[0]
        )
    return best[1]


def _subspace(play: _Play) -> Tensor:
    """Uses that c P modulo 2 has as many parity checks as P has columns more than rows. They cancel the mask, not e."""
    width = play.matrix.width
    odd = (play.matrix.rows(0, HEIGHT) & 1).numpy().astype(np.uint8)
    packed, pivots = np.packbits(odd, axis=1), list[int]()
    for column in range(width):
        has = packed[:, column // 8] >> 7 - column % 8 & 1
        found = has[len(pivots) :].nonzero()[0]
        if not len(found):
            continue
        rank, row = len(pivots), len(pivots) + int(found[0])
        packed[[rank, row]], has[[rank, row]] = packed[[row, rank]], has[[row, rank]]
        has[rank] = 0
        packed[has.nonzero()[0]] ^= packed[rank]
        pivots.append(column)
        if len(pivots) == HEIGHT:
            break
    reduced = torch.from_numpy(np.unpackbits(packed, axis=1, count=width)[: len(pivots)]).float()
    free = torch.ones(width, dtype=torch.bool)
    free[pivots] = False

    def checks(rows: Tensor) -> Tensor:
        parity = (rows & 1).float()
        return (parity[:, free] + parity[:, pivots] @ reduced[:, free]) % 2

    seen, (zeros, other) = checks(play.masked[len(play.coins) :]), checks(play.chosen)
    guessed: Tensor = (seen != other).sum(1) < (seen != zeros).sum(1)
    return guessed


# Faults in the tenant's code


def _one_secret() -> AbstractContextManager[object]:
    real = lattice.secrets
    kept = list[Tensor]()

    def first(words: Tensor) -> Tensor:
        kept.append(real(words)[:1])
        return kept[0].expand(len(words), -1).contiguous()

    return mock.patch.object(lattice, "secrets", first)


def _multiple() -> AbstractContextManager[object]:
    real = lattice.uniform

    def multiple(key: StreamKey, width: int) -> Panels:
        matrix, scaled = real(key, width), Panels.empty(width, bits=32)
        scaled.put(0, matrix.rows(0, HEIGHT) << _SHIFT)
        return scaled

    return mock.patch.object(lattice, "uniform", multiple)


def _no_errors() -> AbstractContextManager[object]:
    return mock.patch.object(
        lattice, "noise", lambda words: torch.zeros((len(words), words.shape[1] // NOISE_WORDS), dtype=torch.int32)
    )
