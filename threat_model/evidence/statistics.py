"""Confidence intervals of success rates, without SciPy."""

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
    low = 0.0 if successes == 0 else _chance_of(tail, successes, trials)
    high = 1.0 if successes == trials else _chance_of(1 - tail, successes + 1, trials)
    return Interval(low, high)


def _chance_of(probability: float, successes: int, trials: int) -> float:
    """The chance with which the tail has this probability, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if binomial_tail(successes, trials, middle) < probability else (low, middle)
    return (low + high) / 2


def binomial_tail(successes: int, trials: int, chance: float) -> float:
    """P(X >= successes) for X ~ Binomial(trials, chance): the probability of at least this score by chance."""
    if successes <= 0 or not 0 < chance < 1:
        return float(successes <= 0 or chance >= 1)
    if successes <= trials * chance:  # the other tail has fewer terms
        return 1 - binomial_tail(trials - successes + 1, trials, 1 - chance)
    failures, total = trials - successes, 0.0
    ways = math.lgamma(trials + 1) - math.lgamma(successes + 1) - math.lgamma(failures + 1)
    term = math.exp(ways + successes * math.log(chance) + failures * math.log1p(-chance))
    for count in range(successes, trials + 1):
        total += term
        term *= (trials - count) / (count + 1) * chance / (1 - chance)
        if term <= 1e-17 * total:  # terms fall from here on
            break
    return total


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
