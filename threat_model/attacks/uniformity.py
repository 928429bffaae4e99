"""Tests if masked rows are uniform: classical tests on every byte, and a trained distinguisher between two known rows.

A one-time pad over the ring makes rows uniform and independent of the rows under the pad. So every test rejects at its
own level, and no distinguisher has an advantage. This attack measures both.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from threat_model.attacks.base import Attack, DirectedAttack, Outcome
from threat_model.evidence.public import Public
from threat_model.evidence.statistics import binomial_tail, clopper_pearson, normal_tail, roc
from threat_model.evidence.truth import Truth
from threat_model.evidence.views import ExecutorView

_LEVEL = 0.01
_MIN_WORDS = 2048
_RIDGE = 0.3


class Uniformity(Attack[ExecutorView, list[bool]]):
    """Chi-square on each byte and serial correlation along and across rows, per layer and direction."""

    name = "uniformity of bytes"
    family = "statistics"
    party = "executor"
    sees = "rows, and relayed blocks"
    source = "Knuth, TAOCP 2, 3.3"
    metric = "tests that reject at 1 %"
    chance = "0.01"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> list[bool]:
        rejected = []
        layers = sorted({(e.group, e.direction) for e in view.exchanges})
        for group, direction in layers:
            # equal lengths, so that all rows of a layer form one matrix of words
            found = view.of(group=group, direction=direction)
            for matrices in ([e.rows for e in found], [e.blocks for e in found if e.blocks is not None]):
                words = torch.cat(matrices).view(torch.int32) if matrices else torch.empty(0)
                if words.numel() >= _MIN_WORDS:
                    words = words << view.unused_bits
                    tests = (*_byte_tests(words, view.unused_bits // 8), *_serial_tests(words))
                    rejected += [p < _LEVEL for p in tests]
        return rejected

    def score(self, guess: list[bool], truth: Truth) -> Outcome:
        hits = sum(guess)
        return Outcome(hits, len(guess), _LEVEL, binomial_tail(hits, len(guess), _LEVEL))


def _byte_tests(words: Tensor, unused: int) -> list[float]:
    """P-values of chi-square with 255 degrees of freedom (Wilson-Hilferty), per byte after the lowest `unused` ones."""
    values = []
    for byte in words.contiguous().view(torch.uint8).view(-1, 4).unbind(dim=1)[unused:]:
        counts = torch.bincount(byte.long(), minlength=256).double()
        expected = counts.sum() / 256
        chi = float(((counts - expected).square() / expected).sum())
        spread = 2 / (9 * 255)
        values.append(normal_tail(((chi / 255) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)))
    return values


def _serial_tests(words: Tensor) -> list[float]:
    """Two-sided p-values of the correlation between neighbours along a row, and down a column."""
    x = words.double() + 0.5  # the mean of a uniform int32 is -1/2
    x = x / (2.0**32 / math.sqrt(12))
    pairs = ((x[:, :-1], x[:, 1:]), (x[:-1], x[1:]))
    return [2 * normal_tail(abs(float((a * b).sum())) / math.sqrt(a.numel())) for a, b in pairs]


@dataclass(frozen=True, eq=False)
class RowScores:
    """Scores of the unknown rows; a score above zero means "the second row"."""

    scores: Tensor


class Distinguisher(DirectedAttack[ExecutorView, RowScores]):
    """Ridge regression from a row's words and bits to the row that lies under the mask, one of two chosen rows.

    In the distinguishing game, the adversary picks two rows, and the tenant masks one of them at random, thousands of
    times.
    """

    name = "two-row distinguisher"
    family = "statistics"
    party = "executor"
    decisive = True
    sees = "rows of a game with two rows that it chose, half of them labelled"
    source = "indistinguishability under chosen plaintext"
    metric = "rows told apart"
    chance = "1/2"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> RowScores | None:
        game = view.games.get(self.direction)
        if game is None:
            return None
        known, unknown = _features(game.known), _features(game.unknown)
        centre, spread = known.mean(dim=0), known.std(dim=0) + 1e-9
        known, unknown = (known - centre) / spread, (unknown - centre) / spread
        target = game.labels.double() * 2 - 1
        gram = known.t() @ known + _RIDGE * len(known) * torch.eye(known.shape[1], dtype=torch.float64)
        return RowScores(unknown @ torch.linalg.solve(gram, known.t() @ target))

    def score(self, guess: RowScores, truth: Truth) -> Outcome:
        coins = truth.coins[self.direction]
        right, n = int(((guess.scores > 0) == coins).sum()), len(coins)
        false, true = roc(guess.scores, coins)
        area = sum((b - a) * (t + u) / 2 for a, b, t, u in zip(false, false[1:], true, true[1:], strict=False))
        interval = clopper_pearson(right, n)
        figures = {
            "advantage": 2 * right / n - 1,
            "advantage, low": 2 * interval.low - 1,
            "advantage, high": 2 * interval.high - 1,
            "theory": 0.0,
            "area under ROC": area,
        }
        every = max(1, n // 200)
        curve = (*zip(false[::every], true[::every], strict=True), (1.0, 1.0))
        return Outcome(right, n, 0.5, binomial_tail(right, n, 0.5), figures, curve)


def _features(rows: Tensor) -> Tensor:
    """A row's words as numbers, and bits 0, 8, 16, 24 and 31 of each: float64 `[n, 6 d]`."""
    words = rows.contiguous().view(torch.int32)
    bits = [((words >> b) & 1).double() for b in (0, 8, 16, 24, 31)]
    size = rows.double()
    return torch.cat([size / (size.abs().mean() + 1e-300), *bits], dim=1)
