"""Attacks on the masks themselves: seeds and samplers that can be guessed, and rows that are not uniform.

A one-time pad over the ring makes rows uniform and independent of the rows under the pad. So every test of uniformity
rejects at its own level, and no distinguisher has an advantage. These attacks measure both.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD
from threat_model.attacks.base import Attack, DirectedAttack, GuessedRows, Labels, Outcome, RowsAttack
from threat_model.attacks.exchanges import noises, stack, unstack
from threat_model.attacks.tokens import FIRST, FirstLayerAttack
from threat_model.evidence.public import Public
from threat_model.evidence.statistics import binomial_tail, normal_tail
from threat_model.evidence.truth import Truth
from threat_model.evidence.views import Exchange, ExecutorView

_SEEDS, _SMALL, _ALIKE = 2048, 1 << 27, 0.5
_SEED_ROWS = 16  # torch makes normals in blocks of 16, so these are also the first numbers of a larger request
_SCALES = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)
_MAX_ROWS, _SCALE_ROWS = 288, 16
_GRID, _TURN = float(1 << 24), 2 * math.pi


class SeedRecovery(RowsAttack[ExecutorView]):
    """Tries seeds 0..2047 of torch's generator, as integers and as normals, in the order of requests.
    `torch.manual_seed(small)` has a few thousand possible streams. One request identifies the stream: in the ring the
    right stream leaves small integers, in floats it leaves vectors in the direction of the rows. The stream then
    unmasks every other request. Without a matching seed there is no guess."""

    name = "seed of the generator"
    sees = "rows, in order"
    source = "rule 1"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> GuessedRows:
        layers = {(e.group, e.direction) for e in view.exchanges}
        online = sorted((e for layer in layers for e in noises(view, *layer)[1]), key=lambda e: e.order)
        first = replace(online[0], rows=online[0].rows[:_SEED_ROWS])
        for seed in range(_SEEDS):
            if _subtracted(first, torch.Generator().manual_seed(seed)) is not None:
                stream = torch.Generator().manual_seed(seed)
                rows = {e.order: _subtracted(e, stream) for e in online}
                return {order: part for order, part in rows.items() if part is not None}
        return {}


def _subtracted(exchange: Exchange, stream: torch.Generator) -> Tensor | None:
    x = exchange.rows
    if exchange.arithmetic == "ring":
        mask = torch.randint(-(1 << 31), 1 << 31, x.shape, generator=stream).to(torch.int32)
        left = (x - mask).double()
        return left if float(left.abs().max()) < _SMALL else None
    noise = torch.randn(x.shape, generator=stream).double()
    rows = x.double()
    scale = float((rows * noise).sum() / noise.square().sum())
    if abs(scale) * float(noise.norm()) < _ALIKE * float(rows.norm()):
        return None
    power = 2.0 ** round(math.log2(abs(scale)))  # people choose round numbers
    return rows - (power if abs(scale / power - 1) < 0.05 else scale) * noise


class SamplerGrid(FirstLayerAttack):
    """Scores every token by the distance of the implied uniform numbers to multiples of 2^-24. torch makes float32
    normals by Box-Muller from uniform numbers with 24 bits: elements j and j + 8 of a block of 16 are `r cos t, r sin
    t` with `t = 2 pi u` and u a multiple of 2^-24. For the right x, `(x' - x) / sigma` lies on that grid; for a wrong x
    it does not. Each pair of coordinates gives a fraction of a bit, and there are d / 2 pairs. Noise of real numbers
    would hide the row, but float32 numbers are not real numbers (Mironov, CCS 2012)."""

    name = "sampler grid"
    sees = "rows of the first layer group, no noise"
    source = "rule 1; Mironov, CCS 2012"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels:
        _, online = noises(view, FIRST, FORWARD)
        before = itertools.accumulate((len(e.rows) for e in online), initial=0)
        kept = tuple(e for e, total in zip(online, before, strict=False) if total < _MAX_ROWS)
        x = stack(kept)
        table = public.vocabulary_rows.double()

        def fits(rows: Tensor, scales: Sequence[float]) -> Tensor:
            """The fit of every token to every row for each noise scale: `[scales, n, v]`."""
            return torch.stack([_on_grid(row - table, scales) for row in rows], dim=1)

        # a few rows suffice to estimate the scale of the noise
        likeliest = fits(x[:_SCALE_ROWS], _SCALES).amax(dim=2).mean(dim=1).argmax()
        return unstack(fits(x, (_SCALES[int(likeliest)],))[0].argmax(dim=1), kept)


def _on_grid(noise: Tensor, scales: Sequence[float]) -> Tensor:
    """Log-likelihood ratio, up to a factor, that each noise row `[v, d]` came from the sampler; `[scales, v]`."""
    width = noise.shape[1] // 16 * 16
    blocks = noise[:, :width].view(len(noise), -1, 2, 8)
    cosine, sine = blocks[:, :, 0], blocks[:, :, 1]
    angle = torch.atan2(sine, cosine)
    angle = angle.where(angle >= 0, angle + _TURN)
    nearest = (angle / _TURN * _GRID).round()
    # the sampler multiplies in float32 and rounds intermediate values, and so does this code
    angles = torch.stack([((nearest + k).float() / _GRID * _TURN).double() for k in (-1, 0, 1)])
    off_angle = torch.cos(_GRID * (angles - angle).abs().amin(dim=0))
    found = []
    for scale in scales:
        # 1 - u of the radius is exp(-r^2/2); rounding of r hides it unless r is small. torch takes ten times as long
        # where the exponential would be 0
        inner = torch.exp((-0.5 * (cosine.square() + sine.square()) / scale**2).clamp(min=-700))
        sharp = (inner * (1 - 2 * inner.clamp(min=1e-30).log()) < 0.3).double()
        steps = inner * _GRID
        found.append((off_angle + torch.cos(2 * math.pi * (steps - steps.floor())) * sharp).sum(dim=(1, 2)))
    return torch.stack(found)


_LEVEL = 0.01
_MIN_WORDS = 2048
_RIDGE = 0.3


class Uniformity(Attack[ExecutorView, list[bool]]):
    """Chi-square on each byte and serial correlation along and across rows, per layer and direction."""

    name = "uniformity of bytes"
    sees = "rows"
    source = "Knuth, TAOCP 2, 3.3"
    metric = "tests that reject at 1 %"
    chance = "0.01"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> list[bool]:
        rejected = []
        layers = sorted({(e.group, e.direction) for e in view.exchanges})
        for group, direction in layers:
            # equal lengths, so that all rows of a layer form one matrix of words
            found = view.of(index=group, direction=direction)
            words = torch.cat([e.rows for e in found]).view(torch.int32)
            if words.numel() >= _MIN_WORDS:
                words = words << view.unused_bits
                tests = _byte_tests(words, view.unused_bits // 8)
                # two-sided, of the correlation between neighbours along a row, and down a column
                x = (words.double() + 0.5) / (2.0**32 / math.sqrt(12))  # the mean of a uniform int32 is -1/2
                for a, b in ((x[:, :-1], x[:, 1:]), (x[:-1], x[1:])):
                    tests.append(2 * normal_tail(abs(float((a * b).sum())) / math.sqrt(a.numel())))
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


class Distinguisher(DirectedAttack[ExecutorView, Tensor]):
    """Ridge regression from a row's words and bits to the row that lies under the mask, one of two chosen rows. In the
    distinguishing game, the adversary picks two rows, and the tenant masks one of them at random, thousands of times. A
    guess has a score for each unknown row; above zero means "the second row"."""

    name = "two-row distinguisher"
    decisive = True
    sees = "rows of a game with two rows that it chose, half of them labelled"
    source = "indistinguishability under chosen plaintext"
    metric = "rows told apart"
    chance = "1/2"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Tensor | None:
        game = view.games.get(self.direction)
        if game is None:
            return None
        known, unknown = _features(game.known), _features(game.unknown)
        centre, spread = known.mean(dim=0), known.std(dim=0) + 1e-9
        known, unknown = (known - centre) / spread, (unknown - centre) / spread
        target = game.labels.double() * 2 - 1
        gram = known.t() @ known + _RIDGE * len(known) * torch.eye(known.shape[1], dtype=torch.float64)
        scores: Tensor = unknown @ torch.linalg.solve(gram, known.t() @ target)
        return scores

    def score(self, guess: Tensor, truth: Truth) -> Outcome:
        coins = truth.coins[self.direction]
        right, n = int(((guess > 0) == coins).sum()), len(coins)
        return Outcome(right, n, 0.5, binomial_tail(right, n, 0.5))


def _features(rows: Tensor) -> Tensor:
    """A row's words as numbers, and bits 0, 8, 16, 24 and 31 of each: float64 `[n, 6 d]`."""
    words = rows.contiguous().view(torch.int32)
    bits = [((words >> b) & 1).double() for b in (0, 8, 16, 24, 31)]
    size = rows.double()
    return torch.cat([size / (size.abs().mean() + 1e-300), *bits], dim=1)
