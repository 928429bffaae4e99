"""Intervals and tails compared with exact sums."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from threat_model.evidence.statistics import agreement_by_chance, binomial_tail, clopper_pearson, normal_tail


def exact_tail(successes: int, trials: int, chance: float) -> float:
    return math.fsum(
        math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(successes, trials + 1)
    )


@given(st.integers(1, 60), st.data(), st.floats(0.01, 0.99))
def test_the_tail_is_the_sum(trials: int, data: st.DataObject, chance: float) -> None:
    successes = data.draw(st.integers(0, trials))
    assert binomial_tail(successes, trials, chance) == pytest.approx(exact_tail(successes, trials, chance), rel=1e-8)


@given(st.integers(1, 60), st.data())
def test_clopper_pearson_ends_where_the_tails_are_half_a_percent(trials: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, trials))
    interval = clopper_pearson(successes, trials)
    assert successes / trials in interval
    if successes:
        assert exact_tail(successes, trials, interval.low) == pytest.approx(0.005, rel=1e-6)
    if successes < trials:
        assert 1 - exact_tail(successes + 1, trials, interval.high) == pytest.approx(0.005, rel=1e-6)


def test_small_tails_stay_accurate() -> None:
    assert binomial_tail(1024, 1024, 0.5) == pytest.approx(2.0**-1024, rel=1e-6)
    assert normal_tail(1.959963985) == pytest.approx(0.025, rel=1e-6)
    assert binomial_tail(3, 5, 0.5) == pytest.approx(0.5)
    assert binomial_tail(50_001, 100_000, 0.5) == pytest.approx(0.5, abs=2e-3)


def test_constant_guesses_score_at_the_chance_level() -> None:
    truth = torch.tensor([1] * 90 + [2] * 10)
    assert agreement_by_chance(torch.ones(100, dtype=torch.long), truth) == pytest.approx(0.9)
    assert agreement_by_chance(truth, truth) == pytest.approx(0.82)
