"""Hypothesis strategies for tests of exact arithmetic, in this project or in another provider or kernel.

They favour inputs that break arithmetic: odd and single widths, outliers of 1e30 beside 1e-30, subnormal numbers, rows
of zeros, one-hot rows, rows that meet a Hölder bound with equality, and the corners of the ring. All of them shrink.

    from hypothesis import given
    from symbiosis_priv.harness import strategies

    @given(strategies.float_rows(width=64))
    def test_my_provider(rows): ...
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS, Direction

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROW_COUNTS = (1, 2, 0, 3, 7, 8, 16, 17)  # row counts on both sides of the sizes that kernels pad to, and 0

EXTREMES = (0.0, 1.0, -1.0, 1e30, -1e30, 1e-30, 65504.0, 6e-8, 1e-45, -1e-38, 2.0**-149, 5e-324, 1.7e308)
"""Outliers, the largest half-precision number, and the smallest normal and subnormal numbers of every format."""

RING_CORNERS = (0, 1, -1, 2**31 - 1, -(2**31), 0x80, -0x80, 0x7F7F7F7F, -0x7F7F7F80, 1 << 29, 1 << 16)
"""Both ends of int32, high powers of two, and numbers whose balanced bytes carry."""

# strategies that are made once: Hypothesis examines every new strategy before it draws from it
_SEEDS = st.integers(0, 2**32 - 1)
_FLOAT_KINDS = st.sampled_from(("sparse", "dense", "ordinary", "constant", "one-hot"))
_FLOATS = st.sampled_from(EXTREMES) | st.floats(allow_nan=False, allow_infinity=False)
_OUTLIERS = st.sampled_from((1.0, 100.0, 1e30))
_RING_KINDS = st.sampled_from(("sparse", "uniform", "corners"))
_RING_CORNERS = st.sampled_from(RING_CORNERS)
_WORDS = _RING_CORNERS | st.integers(-(2**31), 2**31 - 1)
_SOME = 8  # most numbers of a sparse matrix that differ from all others
_SOME_FLOATS = st.lists(st.tuples(_SEEDS, _FLOATS), max_size=_SOME)
_SOME_WORDS = st.lists(st.tuples(_SEEDS, _WORDS), max_size=_SOME)


@functools.cache
def directions() -> SearchStrategy[Direction]:
    return st.sampled_from(DIRECTIONS)


@functools.cache
def row_counts() -> SearchStrategy[int]:
    """Number of rows of a request; may be 0."""
    return st.sampled_from(ROW_COUNTS)


@st.composite
def float_rows(
    draw: DrawFn,
    *,
    width: int | SearchStrategy[int],
    count: int | SearchStrategy[int] | None = None,
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
    largest: float = 1.7e308,
) -> Tensor:
    """Finite activations or gradients, `[count, width]`, one of `dtypes`. `count` is `row_counts()` if None. `largest`
    is the limit of magnitudes (the float path can overflow when the ring does not)."""
    shape = (_draw(draw, row_counts() if count is None else count), _draw(draw, width))
    dtype = draw(_one_of(tuple(dtypes)))
    kind = draw(_FLOAT_KINDS)
    if kind == "sparse":  # Hypothesis chooses and shrinks few values; all other entries have one value
        rows = sparse(shape, draw(_FLOATS), draw(_SOME_FLOATS), np.float64)
    else:
        generator = np.random.default_rng(draw(_SEEDS))
        rows = generator.standard_normal(shape)
        if kind == "dense":  # all magnitudes in one row
            rows *= 10.0 ** generator.uniform(-45, 37, shape)
        elif kind == "ordinary":  # like a model's rows: some channels are much larger
            rows *= np.where(generator.random(shape[1]) < 0.05, draw(_OUTLIERS), 1.0)
        elif kind == "constant":
            rows = np.full(shape, draw(_FLOATS))
        else:
            rows = np.zeros(shape)
            rows[np.arange(shape[0]), generator.integers(0, shape[1], shape[0])] = draw(_FLOATS)
    edge = min(largest, torch.finfo(dtype).max)
    return torch.from_numpy(np.clip(rows, -edge, edge)).to(dtype)


@st.composite
def ring_rows(draw: DrawFn, *, width: int, count: int | SearchStrategy[int] | None = None) -> Tensor:
    """Masked rows or effects, int32 `[count, width]`: uniform with corners, or corners alone."""
    shape = (_draw(draw, row_counts() if count is None else count), width)
    generator = np.random.default_rng(draw(_SEEDS))
    kind = draw(_RING_KINDS)
    if kind == "sparse":
        rows = sparse(shape, draw(_RING_CORNERS), draw(_SOME_WORDS), np.int32)
    elif kind == "uniform":
        rows = generator.integers(-(2**31), 2**31, shape, dtype=np.int32)
    else:
        rows = generator.choice(np.array(RING_CORNERS, dtype=np.int32), shape)
    return torch.from_numpy(rows)


@functools.cache
def _one_of(dtypes: tuple[torch.dtype, ...]) -> SearchStrategy[torch.dtype]:
    return st.sampled_from(dtypes)


def sparse(
    shape: tuple[int, int], common: float, others: Sequence[tuple[int, float]], dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    """A matrix of one number, with other numbers at some places. Places are counted row by row, modulo the size."""
    rows = np.full(shape, common, dtype)
    for place, number in others if rows.size else ():
        rows.flat[place % rows.size] = number
    return rows


def _draw(draw: DrawFn, value: int | SearchStrategy[int]) -> int:
    return value if isinstance(value, int) else draw(value)
