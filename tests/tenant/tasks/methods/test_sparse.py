"""The sparse product and its gradients are those of the dense matrix."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from symbiosis_priv.errors import CheckpointError
from tenant.tasks.methods.sparse import Pattern


@st.composite
def cases(draw: st.DrawFn) -> tuple[Pattern, Tensor, Tensor, Tensor]:
    """A pattern, its entries, the dense matrix, and rows. All values are small integers, so sums are exact."""
    outputs, inputs, rows = (draw(st.integers(low, 9)) for low in (1, 1, 0))
    places = draw(st.lists(st.integers(0, outputs * inputs - 1), unique=True).map(sorted))
    whole = st.integers(-8, 8)
    entries = torch.tensor(draw(st.lists(whole, min_size=len(places), max_size=len(places))), dtype=torch.float32)
    dense = torch.zeros(outputs * inputs)
    dense[places] = entries
    x = torch.tensor(draw(st.lists(whole, min_size=rows * inputs, max_size=rows * inputs)), dtype=torch.float32)
    pattern = Pattern(torch.tensor(places, dtype=torch.int32), (outputs, inputs))
    return pattern, entries, dense.view(outputs, inputs), x.view(rows, inputs)


@given(cases())
def test_product_and_gradients_are_those_of_the_dense_matrix(case: tuple[Pattern, Tensor, Tensor, Tensor]) -> None:
    pattern, entries, dense, x = case
    x, entries, dense = x.requires_grad_(), entries.requires_grad_(), dense.requires_grad_()
    y = pattern.product(x, entries)
    expected = x @ dense.t()
    assert torch.equal(y, expected)
    grad = torch.arange(y.numel(), dtype=torch.float32).view(y.shape) % 5 - 2
    grad_x, grad_entries = torch.autograd.grad(y, (x, entries), grad)
    dense_x, dense_grad = torch.autograd.grad(expected, (x, dense), grad)
    assert torch.equal(grad_x, dense_x)
    assert torch.equal(grad_entries, dense_grad[pattern.rows.long(), pattern.columns.long()])


def test_gradients_agree_with_finite_differences() -> None:
    pattern = Pattern(torch.tensor([0, 3, 4, 11]), (3, 4))
    generator = torch.Generator().manual_seed(0)
    x, entries = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 4), (4,))
    )
    assert torch.autograd.gradcheck(pattern.product, (x, entries))
    assert torch.autograd.gradgradcheck(pattern.product, (x, entries))


@pytest.mark.parametrize("places", [[0, 0], [1, 0], [-1, 2], [0, 12], [[0], [99], [5]], 3])
def test_invalid_places_are_refused(places: Any) -> None:
    with pytest.raises(CheckpointError, match="fetch the adapter again"):
        Pattern(torch.tensor(places), (3, 4))
