"""Arithmetic modulo 2^61 - 1, compiled and with torch, against Python's integers."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from symbiosis_priv.arithmetic import modular
from symbiosis_priv.arithmetic.keystream import StreamKey, expand
from symbiosis_priv.arithmetic.modular import PRIME, Column
from symbiosis_priv.harness import strategies as testing
from tests import drawn
from tests.builds import BUILDS, build

CORNERS = (0, 1, PRIME - 1, PRIME - 2, (1 << 21) - 1, 1 << 21, (1 << 41) - 1, 1 << 41, 1 << 60, 0x5555 << 45)


_SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def columns(draw: st.DrawFn, *, count: int) -> Column:
    """Residues: uniform, or at the limits of limbs and digits."""
    generator = np.random.default_rng(draw(_SEEDS))
    if draw(st.booleans()):
        return Column(torch.from_numpy(generator.integers(0, PRIME, count)))
    return Column(torch.from_numpy(generator.choice(np.array(CORNERS), count)))


def exact(rows: Tensor, column: Column) -> list[int]:
    """`rows @ column` modulo p with Python's integers."""
    values = column.values.tolist()
    return [sum(x * r for x, r in zip(row, values, strict=True)) % PRIME for row in rows.tolist()]


@given(a=columns(count=7), b=columns(count=7))
def test_products_of_residues_are_exact(a: Column, b: Column) -> None:
    got = modular.multiply(a.values[:, None], b.values)
    want = [[x * y % PRIME for y in b.values.tolist()] for x in a.values.tolist()]
    assert got.tolist() == want


def test_the_modulus_is_a_prime_above_every_difference() -> None:
    """Lucas-Lehmer for 2^61 - 1; the difference of two int32 numbers is below 2^32."""
    s = 4
    for _ in range(61 - 2):
        s = (s * s - 2) % PRIME
    assert s == 0
    assert PRIME > 2**33


@pytest.mark.parametrize("name", BUILDS)
@given(data=st.data(), width=drawn.widths(), count=st.integers(0, 4))
def test_dot_is_exact(name: str, data: st.DataObject, width: int, count: int) -> None:
    rows, column = data.draw(testing.ring_rows(width=width, count=count)), data.draw(columns(count=width))
    with build(name):
        assert modular.dot(rows, column).tolist() == exact(rows, column)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("width", [1024, 1025, 16384, 16385, 40_000])
def test_dot_is_exact_where_sums_are_largest(name: str, width: int) -> None:
    """All products have the largest value and one sign: int64 and float64 sums come closest to their limits."""
    rows = torch.tensor([[-(2**31)], [2**31 - 1]], dtype=torch.int32).expand(2, width).contiguous()
    for value in (PRIME - 1, (1 << 60) - 1, (1 << 41) - 1):
        column = Column(torch.full((width,), value))
        with build(name):
            assert modular.dot(rows, column).tolist() == [(int(row[0]) * value * width) % PRIME for row in rows]


@pytest.mark.parametrize("name", BUILDS)
@given(data=st.data(), outputs=drawn.widths(), inputs=drawn.widths(), bits=drawn.weight_bits())
def test_weigh_is_exact(name: str, data: st.DataObject, outputs: int, inputs: int, bits: int) -> None:
    weight = data.draw(drawn.integer_weights(outputs=outputs, inputs=inputs, bits=bits))
    forward, backward = data.draw(columns(count=outputs)), data.draw(columns(count=inputs))
    with build(name):
        down, up = modular.weigh(weight, forward, backward)
    assert down.tolist() == exact(weight.t(), forward)
    assert up.tolist() == exact(weight, backward)


def test_a_uniform_column_is_keystream_cut_to_61_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    key = StreamKey(bytes(range(32)))
    words = expand(key, first_row=0, rows=1, width=20).numpy().astype("<i4").view("<u8")[0]
    assert modular.uniform(key, 10).values.tolist() == [int(word) % 2**61 for word in words]
    ones = torch.full((1, 6), -1, dtype=torch.int32)
    monkeypatch.setattr(modular, "expand", lambda key, **where: ones)
    assert modular.uniform(key, 3).values.tolist() == [0, 0, 0]  # p itself is not a residue
