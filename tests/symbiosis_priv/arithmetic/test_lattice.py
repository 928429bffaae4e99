"""Samplers and sparse products of LWE masks, compiled and with torch, against Python's integers."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from symbiosis_priv.arithmetic import lattice
from symbiosis_priv.arithmetic.keystream import StreamKey, expand
from symbiosis_priv.arithmetic.lattice import HEIGHT, MOST_NOISE, WEIGHT, WORDS, Panels
from symbiosis_priv.limits import HintBits
from tests.builds import BUILDS, build

HALF = WEIGHT // 2
KEY = StreamKey(bytes(range(32)))


def words(rows: int, width: int, *, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, (rows, width), dtype=np.int32))


def subset(choices: list[int], limit: int) -> list[int]:
    """Sendrier's subset from numbers of 128 bits, with sets instead of comparisons."""
    chosen = dict[int, int]()
    for i in reversed(range(len(choices))):
        number = i + (choices[i] * (limit - i) >> 128)
        chosen[i] = i if number in chosen.values() else number
    return [chosen[i] for i in range(len(choices))]


def expected_secret(row: list[int]) -> list[int]:
    choices = [sum((row[4 * i + k] & 0xFFFFFFFF) << 32 * k for k in range(4)) for i in range(len(row) // 4)]
    support, positive = subset(choices[:WEIGHT], HEIGHT), set(subset(choices[WEIGHT:], WEIGHT))
    return [support[i] for i in sorted(range(WEIGHT), key=lambda i: i not in positive)]


def dense(secrets: Tensor) -> Tensor:
    c = torch.zeros((len(secrets), HEIGHT), dtype=torch.int64)
    c.scatter_(1, secrets[:, :HALF].long(), 1)
    return c.scatter_(1, secrets[:, HALF:].long(), -1)


@pytest.mark.parametrize("name", BUILDS)
@settings(max_examples=10)
@given(rows=st.integers(0, 5), seed=st.integers(0, 1 << 32), extreme=st.sampled_from([None, 0, -1, 1 << 30]))
def test_secrets_have_64_entries_of_each_sign(name: str, rows: int, seed: int, extreme: int | None) -> None:
    drawn = words(rows, WORDS, seed=seed)
    if extreme is not None:
        drawn[:, ::2] = extreme
    with build(name):
        secrets = lattice.secrets(drawn)
    assert secrets.tolist() == [expected_secret(row) for row in drawn.tolist()]
    assert dense(secrets).sum(1).tolist() == [0] * rows
    assert dense(secrets).abs().sum(1).tolist() == [WEIGHT] * rows


@pytest.mark.parametrize("name", BUILDS)
@given(rows=st.integers(0, 4), width=st.integers(1, 70), seed=st.integers(0, 1 << 32))
def test_noise_counts_random_bits(name: str, rows: int, width: int, seed: int) -> None:
    drawn = words(rows, 2 * width, seed=seed)
    with build(name):
        noise = lattice.noise(drawn)
    pairs = drawn.view(rows, width, 2).tolist()
    assert noise.tolist() == [[sum((w & 0xFFFFFFFF).bit_count() for w in pair) - 32 for pair in row] for row in pairs]


def chi_square(observed: Tensor, probability: Tensor) -> float:
    """Pearson's statistic as a standard normal deviate."""
    expected = probability * observed.sum()
    statistic, freedom = float(((observed - expected) ** 2 / expected).sum()), len(observed) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_samplers_have_their_distributions() -> None:
    """Keys are fixed, so the test always has the same result. For other keys it fails once in 10^4 times (|z| < 4)."""
    noise = lattice.noise(expand(KEY, first_row=0, rows=500, width=8000)).flatten()
    assert int(noise.abs().max()) <= MOST_NOISE
    probability = torch.tensor([math.comb(64, count) / 2**64 for count in range(65)], dtype=torch.float64)
    common = probability * len(noise) > 20
    counts = torch.bincount(noise + 32, minlength=65).double()
    assert abs(chi_square(counts[common], probability[common] / probability[common].sum())) < 4
    assert float(noise.double().square().mean()) == pytest.approx(lattice.SIGMA**2, rel=0.005)

    secrets = lattice.secrets(expand(KEY, first_row=0, rows=20_000, width=WORDS)).long()
    uniform = torch.full((HEIGHT,), 1 / HEIGHT, dtype=torch.float64)
    for sign in (secrets[:, :HALF], secrets[:, HALF:]):
        # 64 of 2,048 without replacement: counts vary 3 % less than a multinomial's
        assert abs(chi_square(torch.bincount(sign.flatten(), minlength=HEIGHT).double(), uniform)) < 4
    # neighbours c_i, c_{i+1} are both there as often as any two entries; their signs differ a little more often
    c = dense(secrets)
    products, both = (c[:, :-1] * c[:, 1:]).sum().item(), WEIGHT * (WEIGHT - 1) / HEIGHT
    assert abs(products + len(c) * WEIGHT / HEIGHT) < 4 * (len(c) * both) ** 0.5
    assert abs(int((c[:, :-1] * c[:, 1:]).abs().sum()) - len(c) * both) < 4 * (len(c) * both) ** 0.5


@pytest.mark.parametrize("bits", get_args(HintBits))
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("width", [1, 63, 129, 700])
def test_products_are_exact_for_the_rounded_matrix(name: str, bits: HintBits, width: int) -> None:
    matrix = words(HEIGHT, width, seed=width)
    matrix[:4] = torch.tensor([-(1 << 31), (1 << 31) - 1, 0, -1], dtype=torch.int32)[:, None]  # rounding may wrap
    panels = Panels.empty(width, bits=bits)
    added = torch.cat([panels.put(first, matrix[first : first + 1000]) for first in range(0, HEIGHT, 1000)])
    assert int(added.abs().max()) <= lattice.most_error(bits) // WEIGHT
    assert not added.any() or bits < 32
    secrets = lattice.secrets(words(3, WORDS, seed=bits))
    secrets[0, :4] = torch.tensor([0, 1, 2, 3])
    out = words(3, width, seed=5)
    want = out + (dense(secrets) @ (matrix.long() + added)).to(torch.int32)
    with build(name):
        panels.add_product(secrets, out)
    assert torch.equal(out, want)
