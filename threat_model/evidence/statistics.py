"""Confidence intervals of success rates, and the largest leak of a float mask.

The functions need no SciPy: the incomplete beta function by its continued
fraction (Lentz), its inverse by bisection. The tests check it against exact sums.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

CONFIDENCE = 0.99
"""The confidence of every interval in a report."""

FALSE_ALARM = 1e-8
"""A cell counts as broken if the probability of its score by chance is smaller than this. With a few hundred cells per
report, a sound scheme is then called broken in about one of a million reports."""


@dataclass(frozen=True)
class Interval:
    low: float
    high: float

    def __contains__(self, rate: float) -> bool:
        return self.low <= rate <= self.high


@cache  # a report asks for each interval several times
def clopper_pearson(successes: int, trials: int, *, confidence: float = CONFIDENCE) -> Interval:
    """The exact interval (Clopper and Pearson, Biometrika 1934). Its coverage is at least `confidence`."""
    if not trials:
        return Interval(0.0, 1.0)
    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else _beta_quantile(tail, successes, trials - successes + 1)
    high = 1.0 if successes == trials else _beta_quantile(1 - tail, successes + 1, trials - successes)
    return Interval(low, high)


def binomial_tail(successes: int, trials: int, chance: float) -> float:
    """P(X >= successes) for X ~ Binomial(trials, chance): the probability of at least this score by chance."""
    if successes <= 0:
        return 1.0
    if chance <= 0:
        return 0.0
    return 1.0 if chance >= 1 else beta_cdf(chance, successes, trials - successes + 1)


def normal_tail(z: float) -> float:
    """P(Z >= z) of a standard normal."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def agreement_by_chance(guess: Tensor, truth: Tensor) -> float:
    """The success rate of randomly permuted guesses: the chance level. This is the mean of `guess[pi] == truth` over
    all permutations pi, in closed form. An attack that always guesses the most frequent token scores exactly at this
    level. `guess`, `truth`: int64 `[n]`."""
    if not len(truth):
        return 0.0
    labels, place = torch.cat([guess, truth]).unique(return_inverse=True)
    counts = [torch.bincount(part, minlength=len(labels)).double() for part in place.chunk(2)]
    return float(counts[0] @ counts[1]) / len(truth) ** 2


def gaussian_channel_bits(noise_scale: float) -> float:
    """Largest number of bits that one masked row reveals about one coordinate. `noise_scale` is relative to its spread.
    The capacity of the Gaussian channel is `1/2 log2(1 + 1/scale^2)` (Shannon 1948). The bits add up over coordinates
    and over repeated maskings of a row. The bound does not hold if noise is reused, or is rounded to float32."""
    return 0.5 * math.log2(1 + noise_scale**-2)


def roc(scores: Tensor, positive: Tensor) -> tuple[list[float], list[float]]:
    """(false positive rates, true positive rates) as the threshold falls. `scores`: float `[n]`, higher means more
    likely positive; `positive`: bool `[n]`."""
    order = scores.argsort(descending=True)
    hits = positive[order].double()
    rise = torch.cumsum(hits, 0) / hits.sum().clamp(min=1)
    run = torch.cumsum(1 - hits, 0) / (1 - hits).sum().clamp(min=1)
    return [0.0, *run.tolist()], [0.0, *rise.tolist()]


def beta_cdf(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(x, a, b) / a
    return 1 - front * _beta_fraction(1 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, by the modified Lentz method."""
    tiny = 1e-300
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        step = 1.0
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d, tiny)
            c = _away_from_zero(1 + term / c, tiny)
            step = c * d
            value *= step
        if abs(step - 1) < 1e-14:
            break
    return value


def _away_from_zero(x: float, tiny: float) -> float:
    return x if abs(x) > tiny else tiny


def _beta_quantile(p: float, a: float, b: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if beta_cdf(middle, a, b) < p else (low, middle)
    return (low + high) / 2
