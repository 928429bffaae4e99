"""The ring's promises, compared with exact integer arithmetic: no product leaves the range, masking changes nothing."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor

from symbiosis_priv.arithmetic.quantise import QuantisedGroup, quantise
from symbiosis_priv.arithmetic.ring import BACKWARD, RANGE, Bound, Direction, quantise_rows
from symbiosis_priv.errors import RangeError
from symbiosis_priv.harness import strategies as testing
from tests import drawn


def group_of(weight: Tensor) -> QuantisedGroup:
    return QuantisedGroup(weight, torch.ones(len(weight), dtype=torch.float64), None)


def matrix_of(group: QuantisedGroup, direction: Direction) -> Tensor:
    """The matrix `[width, outputs]` with which rows of a direction are multiplied."""
    return group.weight if direction == BACKWARD else group.weight.t()


def assert_inside(rows: Tensor, group: QuantisedGroup, direction: Direction) -> None:
    xq, _ = quantise_rows(rows, group.bounds()[direction])
    # in int64, which int32 rows and 12-bit weights do not overflow below 2^20 terms
    product = xq.numpy().astype(np.int64) @ matrix_of(group, direction).numpy().astype(np.int64)
    assert np.abs(product).max(initial=0) < RANGE


@given(st.data(), testing.directions(), drawn.weight_bits())
def test_no_product_leaves_the_range(data: DataObject, direction: Direction, bits: int) -> None:
    """Neither of any rows, nor of rows for which the bounds are tight."""
    outputs, inputs = data.draw(drawn.widths()), data.draw(drawn.widths(largest=600))
    tight = group_of(data.draw(drawn.integer_weights(outputs=outputs, inputs=inputs, bits=bits)))
    assert_inside(drawn.tight_rows(matrix_of(tight, direction).t()), tight, direction)
    group = quantise(data.draw(drawn.layers()), weight_bits=bits)
    assert_inside(data.draw(testing.float_rows(width=matrix_of(group, direction).shape[0])), group, direction)


@pytest.mark.parametrize("bits", [4, 12])
@pytest.mark.parametrize("width", [1, 4097, 150_001])
def test_no_product_leaves_the_range_of_a_wide_layer(width: int, bits: int) -> None:
    peak = 2 ** (bits - 1) - 1
    group = group_of(torch.full((1, width), peak, dtype=torch.int16))
    assert_inside(drawn.tight_rows(group.weight), group, "forward")


@given(st.data(), drawn.weight_bits(), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_rows_use_the_full_range(data: DataObject, bits: int, seed: int, density: float) -> None:
    """Rows meet the better of the two Hölder bounds within 1 %; the other bound would waste range."""
    outputs, inputs = data.draw(drawn.widths()), data.draw(drawn.widths())
    weight = data.draw(drawn.integer_weights(outputs=outputs, inputs=inputs, bits=bits))
    bound = group_of(weight).bounds()["forward"]
    generator = np.random.default_rng(seed)
    row = generator.standard_normal((1, inputs)) * (generator.random((1, inputs)) <= density)
    assume(row.any() and weight.any())
    xq = quantise_rows(torch.from_numpy(row), bound)[0].double()
    by_sum, by_length = float(xq.abs().sum()) * bound.weight_absmax, float(xq.norm()) * bound.weight_norm
    assert 0.99 * RANGE < min(by_sum, by_length) < 1.01 * RANGE


@given(rows=testing.float_rows(width=drawn.widths(), count=st.integers(1, 6)), data=st.data())
def test_rounding_error_is_half_a_step(rows: Tensor, data: DataObject) -> None:
    bound = Bound(inputs=rows.shape[1], weight_absmax=511, weight_norm=511 * math.sqrt(rows.shape[1]))
    xq, scale = quantise_rows(rows, bound)
    i = data.draw(st.integers(0, rows.shape[0] - 1))
    step = Fraction(float(scale[i, 0]))
    for value, integer in zip(rows[i].double().tolist(), xq[i].tolist(), strict=True):
        x = Fraction(value)
        # Three float64 roundings (x / peak, times the factor, the scale itself) change x by at most 4 eps; a subnormal
        # scale is off by half of the spacing of subnormal numbers.
        slack = 4 * abs(x) * Fraction(2) ** -52 + abs(integer) * Fraction(2) ** -1075
        assert abs(x - integer * step) <= step / 2 + slack


@given(data=st.data(), rows=testing.float_rows(width=drawn.widths(), count=st.integers(1, 9)))
def test_a_row_does_not_depend_on_its_batch(data: DataObject, rows: Tensor) -> None:
    bound = Bound(inputs=rows.shape[1], weight_absmax=511, weight_norm=2000.0)
    together = quantise_rows(rows, bound)
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    permuted = quantise_rows(rows[order], bound)
    alone = [quantise_rows(row[None], bound) for row in rows]
    for k in range(2):  # integers and scales
        assert torch.equal(permuted[k], together[k][order])
        assert torch.equal(torch.cat([one[k] for one in alone]), together[k])


@pytest.mark.parametrize(("width", "absmax"), [(0, 1), (-1, 1), (1 << 22, 1), (1 << 21, 2048)])
def test_widths_outside_the_proof_or_that_rounding_alone_could_fill_are_refused(width: int, absmax: int) -> None:
    with pytest.raises(RangeError, match="fewer weight bits" if absmax > 1 else None):
        Bound(inputs=width, weight_absmax=absmax, weight_norm=absmax * math.sqrt(max(width, 1)))
