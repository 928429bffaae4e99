"""One packed copy of a stack serves dense products and products by expert, with every kernel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.layers import Joined
from symbiosis_priv.errors import RangeError
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.kernels import KERNELS, RingMatrix, choose
from tests.stacks import expert_counts, expert_product

KERNEL_NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(not kernel.supports(torch.device("cpu")), reason="not on this CPU"))
    for name, kernel in KERNELS.items()
    if name != "triton"  # has the same layout as `limbs`, and its interpreter is slow
]


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
@settings(max_examples=15)
@given(
    counts=expert_counts(3),
    bits=st.sampled_from([8, 10]),
    joined=st.sampled_from(["outputs", "inputs"]),
    direction=testing.directions(),
    data=st.data(),
)
def test_a_stack_serves_dense_products_and_products_by_expert(
    kernel: str, counts: Counts, bits: int, joined: Joined, direction: Direction, data: DataObject
) -> None:
    experts, height, width = len(counts), KERNELS[kernel].granule * 2, 37
    generator = torch.Generator().manual_seed(0)
    peak = 2 ** (bits - 1)
    packed = torch.randint(1 - peak, peak, (experts * height, width), generator=generator, dtype=torch.int16)
    weight = packed if joined == "outputs" else packed.t()
    matrix = RingMatrix(packed, weight_bits=bits, kernel=kernel).as_stack(experts, transposed=joined == "inputs")
    rows = data.draw(testing.ring_rows(width=matrix.columns(direction, by_expert=True)[0], count=sum(counts)))
    got = matrix.product(rows, direction, counts=counts)
    assert got.is_contiguous()
    assert torch.equal(got, expert_product(weight, counts, rows, direction, joined))
    dense = data.draw(testing.ring_rows(width=matrix.columns(direction)[0], count=2))
    assert torch.equal(matrix.product(dense, direction), expert_product(weight, (2,), dense, direction, joined))


@pytest.mark.parametrize("height", [64, 24, 1])
def test_the_chosen_layout_can_be_cut_between_experts(height: int) -> None:
    choice = choose((6 * height, 40), weight_bits=10, device=torch.device("cpu"), height=height)
    assert all(height % KERNELS[name].granule == 0 for name in choice.kernels.values())


def test_counts_that_do_not_match_the_rows_are_refused() -> None:
    stack = RingMatrix(torch.ones(12, 5, dtype=torch.int16), weight_bits=8, kernel="int32").as_stack(
        3, transposed=False
    )
    rows = torch.ones(4, 5, dtype=torch.int32)
    with pytest.raises(RangeError, match="experts"):
        stack.product(rows, counts=(2, 1, 0))
    with pytest.raises(RangeError, match="experts"):
        stack.product(rows, counts=(4,))
