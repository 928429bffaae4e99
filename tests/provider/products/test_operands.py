"""Products with copies: every chunk of the rows is multiplied, and its result is in the right place."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from provider.products.model import Transfers
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.kernels import RingMatrix
from tests import drawn
from tests.stacks import expert_counts


@given(data=st.data(), direction=testing.directions(), chunk=st.integers(1, 9))
def test_a_product_in_chunks_equals_the_whole_product(data: DataObject, direction: Direction, chunk: int) -> None:
    matrix = RingMatrix(data.draw(drawn.integer_weights(outputs=13, inputs=24, bits=10)), weight_bits=10)
    rows = data.draw(testing.ring_rows(width=24 if direction == FORWARD else 13, count=st.integers(0, 20)))
    before = rows.clone()
    got = Transfers(torch.device("cpu"), chunk=chunk).product(matrix, rows, direction)
    assert torch.equal(got, matrix.product(rows, direction))
    assert torch.equal(rows, before)


@given(counts=expert_counts(3), chunk=st.integers(1, 9), turned=st.booleans(), direction=testing.directions())
def test_a_product_by_expert_in_chunks_equals_the_whole_product(
    counts: Counts, chunk: int, turned: bool, direction: Direction
) -> None:
    weight = torch.arange(12 * 7, dtype=torch.int16).view(12, 7)
    matrix = RingMatrix(weight, weight_bits=8, kernel="int32").as_stack(3, transposed=turned)
    width, _ = matrix.columns(direction, by_expert=True)
    rows = torch.arange(sum(counts) * width, dtype=torch.int32).view(-1, width)
    got = Transfers(torch.device("cpu"), chunk=chunk).product(matrix, rows, direction, counts=counts)
    assert torch.equal(got, matrix.product(rows, direction, counts=counts))


def test_one_part_needs_no_second_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events and streams would take as long as a small product."""
    matrix = RingMatrix(torch.ones((3, 5), dtype=torch.int16), weight_bits=10)
    transfers = Transfers(torch.device("cpu"), chunk=4)
    used: list[object] = []
    stream = transfers._module.stream

    def noted(which: Any) -> Any:
        used.append(which)
        return stream(which)

    monkeypatch.setattr(transfers._module, "stream", noted)
    for rows, streams in ((0, 0), (1, 0), (4, 0), (5, 4)):
        used.clear()
        transfers.product(matrix, torch.ones((rows, 5), dtype=torch.int32), FORWARD)
        assert len(used) == streams


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_wait_for_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-511, 512, (4096, 2048), dtype=torch.int16, generator=generator)
    here, there = RingMatrix(weight, weight_bits=10), RingMatrix(weight, weight_bits=10, device="cuda")
    transfers = Transfers(torch.device("cuda"), chunk=64)
    for _ in range(20):
        rows = torch.randint(-(2**31), 2**31, (1000, 2048), dtype=torch.int32, generator=generator)
        assert torch.equal(transfers.product(there, rows, FORWARD), here.product(rows))
