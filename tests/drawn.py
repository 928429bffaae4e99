"""Hypothesis strategies for weights and layers."""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from symbiosis_priv.arithmetic.quantise import Layer
from symbiosis_priv.harness.strategies import FLOAT_DTYPES, float_rows, sparse
from symbiosis_priv.limits import MAX_WEIGHT_BITS, MIN_WEIGHT_BITS

_SEEDS = st.integers(0, 2**32 - 1)
_KINDS = st.sampled_from(("uniform", "peak", "signs", "sparse"))


@functools.cache
def weight_bits() -> SearchStrategy[int]:
    """Every precision that `quantise` accepts."""
    return st.integers(MIN_WEIGHT_BITS, MAX_WEIGHT_BITS)


@functools.cache
def widths(*, largest: int = 70) -> SearchStrategy[int]:
    """Feature counts: 1, odd ones, and both sides of a multiple of 4, 8 and 64."""
    usual = [n for n in (5, 1, 3, 8, 9, 16, 31, 64, 65) if n <= largest]
    return st.sampled_from(usual) | st.integers(1, largest)


def tight_rows(weight: Tensor) -> Tensor:
    """Rows whose products are as large as the range allows, for an integer matrix `[o, d]`: float64 `[2 o + 2, d]`.

    A row parallel to a channel meets the 2-norm bound with equality, a row of a channel's signs the 1-norm bound. With
    rows of ones, every coordinate is rounded in the same direction.
    """
    channels = weight.to(torch.float64)
    ones = torch.ones(2, weight.shape[1], dtype=torch.float64, device="cpu")
    ones[1] *= -1
    return torch.cat([channels, channels.sign(), ones])


@st.composite
def integer_weights(draw: DrawFn, *, outputs: int, inputs: int, bits: int) -> Tensor:
    """Quantised weights, int16 `[outputs, inputs]` with `|w| < 2^(bits - 1)`: uniform, all extreme, or mostly zero."""
    peak = (1 << (bits - 1)) - 1
    generator = np.random.default_rng(draw(_SEEDS))
    kind = draw(_KINDS)
    shape = (outputs, inputs)
    if kind == "sparse":
        return torch.from_numpy(sparse(shape, draw(_entries(peak)), draw(_some_entries(peak)), np.int16))
    if kind == "uniform":
        return torch.from_numpy(generator.integers(-peak, peak + 1, shape, dtype=np.int16))
    signs = generator.choice(np.array([-peak, peak], dtype=np.int16), shape)
    return torch.from_numpy(np.abs(signs) if kind == "peak" else signs)


@functools.cache
def _entries(peak: int) -> SearchStrategy[int]:
    return st.integers(-peak, peak)


@functools.cache
def _some_entries(peak: int) -> SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(_SEEDS, _entries(peak)), max_size=8)


@st.composite
def layers(
    draw: DrawFn, *, members: int | None = None, largest: int = 24, dtypes: Sequence[torch.dtype] = FLOAT_DTYPES
) -> list[Layer]:
    """The float members of one layer group: one input width, their own output widths, with bias and without."""
    inputs = draw(widths(largest=largest))
    group = []
    for i in range(members or draw(st.integers(1, 3))):
        outputs = draw(widths(largest=largest))
        weight = draw(float_rows(width=inputs, count=outputs, dtypes=dtypes))
        bias = draw(float_rows(width=outputs, count=1, dtypes=dtypes, largest=1e38))[0] if draw(st.booleans()) else None
        group.append(Layer(f"layer.{i}", weight, bias))
    return group
