"""Composed matrices: the same bits whatever the order of sums, threads and dtype. `test_residuals.py` has the truth."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from symbiosis_priv.arithmetic.quantise import Layer, centred, compose, quantise
from symbiosis_priv.errors import CheckpointError


@st.composite
def factors(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """`second`, `gain` and `first`, with outliers and zero rows."""
    o, d, k = (draw(st.integers(1, 9)) for _ in range(3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))
    second, gain, first = (torch.randn(*shape, generator=generator) for shape in ((o, d), (d,), (d, k)))
    for matrix in (second, first):
        matrix[draw(st.integers(0, len(matrix) - 1))] *= draw(st.sampled_from([0.0, 1e-30, 1.0, 1e4]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    return second.to(dtype), gain.to(dtype), first.to(dtype)


def in_whole_numbers(second: Tensor, gain: Tensor, first: Tensor) -> Tensor:
    """The oracle: the same roundings one entry at a time, and Python's integers for the product."""

    def rounded(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale = np.array([max(map(abs, row)) / 2**19 for row in matrix])
        scale[scale < np.finfo(np.float64).tiny] = 0.0
        rows = zip(matrix.tolist(), scale.tolist(), strict=True)
        whole = [[round(x / s) if s else 0 for x in row] for row, s in rows]
        return np.array(whole, dtype=object), scale

    below, scale = rounded(first.double().numpy())
    above, steps = rounded(second.double().numpy() * (gain.double().numpy() * scale))
    product = above @ below
    return torch.from_numpy(product.astype(np.float64) * steps[:, None]).to(torch.float32)


@given(factors())
def test_the_product_is_that_of_whole_numbers(matrices: tuple[Tensor, Tensor, Tensor]) -> None:
    assert torch.equal(compose(*matrices), in_whole_numbers(*matrices))


def exactly(matrix: Tensor) -> list[list[Fraction]]:
    return [[Fraction(x) for x in row] for row in matrix.double().reshape(len(matrix), -1).tolist()]


@given(factors())
def test_a_centred_matrix_is_off_by_little(matrices: tuple[Tensor, Tensor, Tensor]) -> None:
    """A mean is off by half a step of 2^-38 of the matrix's largest entry, and float64 rounds a few times."""
    first = exactly(matrices[2])
    top = max(abs(x) for row in first for x in row)
    means = [sum(column, Fraction()) / len(first) for column in zip(*first, strict=True)]
    for row, made in zip(first, exactly(centred(matrices[2])), strict=True):
        for x, mean, y in zip(row, means, made, strict=True):
            assert abs(y - (x - mean)) <= top * (Fraction(1, 2**39) + Fraction(1, 2**50)) + Fraction(1e-300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_order_nor_threads_nor_blocks_change_a_bit(
    dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    generator = torch.Generator().manual_seed(7)
    second, first = (torch.randn(*s, generator=generator).to(dtype) for s in ((1500, 700), (700, 300)))
    gain = torch.rand(700, generator=generator).to(dtype)
    order = torch.randperm(700, generator=generator)
    made = []
    for threads in (1, 2, 5):
        set_threads(threads)
        made += [compose(second, gain, first), compose(second[:, order], gain[order], first[order])]
        made.append(torch.cat([compose(part, gain, first) for part in second.split(311)]))
        made.append(compose(second.t().contiguous().t(), gain, first.t().contiguous().t()))
        assert torch.equal(centred(first)[order], centred(first[order]))
    assert all(torch.equal(made[0], other) for other in made)
    assert len({quantise([Layer("x", m, None)]).digest() for m in made}) == 1


def test_a_composed_row_without_a_number_is_refused() -> None:
    first = torch.ones(3, 2)
    first[1, 1] = torch.inf
    with pytest.raises(CheckpointError, match="inf or nan"):
        quantise([Layer("x", compose(torch.ones(4, 3), torch.ones(3), first), None)])


def test_rows_too_long_to_be_exact_are_refused() -> None:
    width = (1 << 15) + 1
    with pytest.raises(CheckpointError, match="round_trips"):
        compose(torch.ones(1, width), torch.ones(width), torch.ones(width, 1))
