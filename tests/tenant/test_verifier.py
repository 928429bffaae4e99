"""Freivalds in the ring: true products always pass, false ones never do, and what is kept stays secret."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from symbiosis_priv import testing
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.kernels import RingMatrix
from symbiosis_priv.ring import FORWARD, RANGE, Direction, in_range
from tenant.verifier import VerificationKeys


def keys_of(weight: Tensor, *, bits: int = 12, columns: int = 16) -> VerificationKeys:
    keys = VerificationKeys.fresh(columns=columns)
    keys.add(0, weight, weight_bits=bits)
    return keys


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Direction]:
    """(weight, rows, their product, direction)"""
    outputs, inputs, bits = draw(testing.widths()), draw(testing.widths()), draw(testing.weight_bits())
    weight = draw(testing.integer_weights(outputs=outputs, inputs=inputs, bits=bits))
    direction = draw(testing.directions())
    rows = draw(testing.ring_rows(width=inputs if direction == FORWARD else outputs))
    product = RingMatrix(weight, weight_bits=bits, kernel="int32").product(rows, transposed=direction != FORWARD)
    return weight, rows, product, direction


@given(cases())
def test_true_products_pass(case: tuple[Tensor, Tensor, Tensor, Direction]) -> None:
    weight, rows, product, direction = case
    assert keys_of(weight).accepts(0, direction, rows=rows, answer=product)


@given(cases(), st.data())
def test_a_wrong_entry_never_passes(case: tuple[Tensor, Tensor, Tensor, Direction], data: st.DataObject) -> None:
    """Any single error: by the check itself if its 2-adic valuation is below 30, by the guard bits otherwise."""
    weight, rows, product, direction = case
    if not product.numel():
        return
    place = data.draw(st.integers(0, product.numel() - 1))
    valuation = data.draw(st.integers(0, 31))
    error = (2 * data.draw(st.integers(0, 2**31 - 1)) + 1) << valuation
    wrong = product.to(torch.int64)
    wrong.view(-1)[place] += error - (1 << 32 if error >= 1 << 31 else 0)
    passed = keys_of(weight).accepts(0, direction, rows=rows, answer=wrong.to(torch.int32))
    assert not (passed and valuation < 30)
    true = data.draw(st.integers(1 - RANGE, RANGE - 1))  # what the entry is once it is unmasked
    lie = torch.tensor([true + error]).to(torch.int32)
    assert valuation < 30 or not in_range(lie)


@given(cases(), testing.directions())
def test_another_shape_or_dtype_never_passes(case: tuple[Tensor, Tensor, Tensor, Direction], other: Direction) -> None:
    weight, rows, product, direction = case
    keys = keys_of(weight)
    wider = torch.nn.functional.pad(product, (0, 1))
    longer = torch.nn.functional.pad(product, (0, 0, 0, 1))
    for wrong in (wider, longer, product[:, 1:], product.to(torch.int64), product.to(torch.float32)):
        assert not keys.accepts(0, direction, rows=rows, answer=wrong)


def test_columns_are_uniform_over_the_whole_ring() -> None:
    """Small or sparse columns could be learned by probing. Every bit is fair; by chance unfair: below 1e-12."""
    keys = keys_of(torch.ones(8, 2048, dtype=torch.int16))
    r = keys._matrices[0, "backward"]
    assert r.shape == (2048, 16)
    for bit in range(32):
        ones = int((r >> bit & 1).sum())
        assert abs(ones - r.numel() / 2) < 7.2 * (r.numel() / 4) ** 0.5


def test_keys_are_fresh_and_differ_by_layer_and_direction() -> None:
    weight = torch.ones(8, 8, dtype=torch.int16)
    matrices = []
    for _ in range(2):
        keys = keys_of(weight)
        keys.add(1, weight, weight_bits=10)
        matrices += [r.numpy().tobytes() for r in keys._matrices.values()]
    assert len(matrices) == len(set(matrices)) == 8


@given(cases())
def test_keys_survive_the_disk(case: tuple[Tensor, Tensor, Tensor, Direction]) -> None:
    weight, rows, product, direction = case
    keys = keys_of(weight, columns=9)
    again = VerificationKeys.from_tensors(keys.to_tensors(), columns=9)
    assert again.accepts(0, direction, rows=rows, answer=product)
    for kept in ("_matrices", "_products"):
        before, after = getattr(keys, kept), getattr(again, kept)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[k], after[k]) for k in before)


def test_damaged_keys_are_refused() -> None:
    tensors = keys_of(torch.ones(2, 2, dtype=torch.int16)).to_tensors()
    tensors["secret"] = tensors["secret"][:31]
    with pytest.raises(CheckpointError, match="damaged"):
        VerificationKeys.from_tensors(tensors, columns=16)


def test_nothing_secret_is_printed() -> None:
    keys = keys_of(torch.ones(2, 2, dtype=torch.int16))
    assert repr(keys) == "VerificationKeys(2 products, 16 columns)"
