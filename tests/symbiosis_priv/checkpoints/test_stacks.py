"""A stack of experts as one dense matrix: its product contains the products of single experts, or their sum."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from symbiosis_priv.checkpoints.layers import GroupSpec
from symbiosis_priv.checkpoints.stacks import join, separate

SMALL = st.integers(1, 4)


def stack_of(experts: int, outputs: int, inputs: int, *, transposed: bool) -> Tensor:
    shape = (experts, inputs, outputs) if transposed else (experts, outputs, inputs)
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(experts * outputs + inputs))


def of_one(rows: Tensor, matrix: Tensor, *, transposed: bool) -> Tensor:
    return rows @ (matrix if transposed else matrix.t())


@given(SMALL, SMALL, SMALL, st.booleans())
def test_joined_along_outputs_every_expert_multiplies_the_row(e: int, o: int, d: int, transposed: bool) -> None:
    stack = stack_of(e, o, d, transposed=transposed)
    rows = torch.arange(3 * d).view(3, d)
    product = rows @ join(stack, joined="outputs", transposed=transposed).t()
    assert torch.equal(product, torch.cat([of_one(rows, m, transposed=transposed) for m in stack], dim=1))


@given(SMALL, SMALL, SMALL, st.booleans())
def test_joined_along_inputs_the_product_is_the_sum_over_experts(e: int, o: int, d: int, transposed: bool) -> None:
    stack = stack_of(e, o, d, transposed=transposed)
    rows = torch.arange(3 * e * d).view(3, e, d)
    product = rows.flatten(1) @ join(stack, joined="inputs", transposed=transposed).t()
    parts = [of_one(rows[:, k], m, transposed=transposed) for k, m in enumerate(stack)]
    assert torch.equal(product, torch.stack(parts).sum(0))


@given(SMALL, SMALL, SMALL, st.booleans(), st.sampled_from(["outputs", "inputs"]))
def test_a_matrix_is_separated_into_the_stack_it_was_joined_from(
    e: int, o: int, d: int, transposed: bool, joined: str
) -> None:
    stack = stack_of(e, o, d, transposed=transposed)
    matrix = join(stack, joined=joined, transposed=transposed)  # type: ignore[arg-type]
    back = separate(matrix, experts=e, joined=joined, transposed=transposed)  # type: ignore[arg-type]
    assert torch.equal(back, stack)
    group = GroupSpec(("experts.stack",), matrix.shape[1], (matrix.shape[0],), e, joined)  # type: ignore[arg-type]
    assert group.shape(matrix.shape[0], transposed=transposed) == (stack.shape if e > 1 else stack.shape[1:])
