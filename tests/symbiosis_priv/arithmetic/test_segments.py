"""Cutting counts and merging those of several requests leaves every row with its expert."""

import pytest
import torch
from hypothesis import given, strategies as st

from symbiosis_priv.arithmetic.segments import Counts, check_counts, clip, merge, pick, segments
from symbiosis_priv.errors import RangeError
from tests.stacks import expert_counts


def experts_of(counts: Counts) -> list[int]:
    """Return the expert of every row."""
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


@given(counts=expert_counts(), first=st.integers(0, 20), rows=st.integers(0, 20))
def test_clipped_counts_keep_the_expert_of_every_row(counts: Counts, first: int, rows: int) -> None:
    clipped = clip(counts, first, rows)
    assert experts_of(clipped) == experts_of(counts)[first : first + rows]
    assert len(clipped) == len(counts)


@given(counts=expert_counts(), chosen=st.sets(st.integers(0, 20)))
def test_picked_rows_keep_their_experts(counts: Counts, chosen: set[int]) -> None:
    experts = experts_of(counts)
    numbers = sorted(number for number in chosen if number < len(experts))
    picked = pick(counts, numbers)
    assert experts_of(picked) == [experts[number] for number in numbers]
    assert len(picked) == len(counts)


@given(counts=expert_counts())
def test_segments_list_the_experts_that_have_rows(counts: Counts) -> None:
    experts = experts_of(counts)
    found = list(segments(counts))
    assert [expert for expert, rows in found for _ in experts[rows]] == experts
    assert all(rows.start < rows.stop for _, rows in found)


@given(parts=st.lists(expert_counts(), min_size=1, max_size=4))
def test_merged_rows_are_sorted_by_expert_and_in_order_within_an_expert(parts: list[Counts]) -> None:
    counts, order = merge(parts)
    experts = torch.tensor([expert for part in parts for expert in experts_of(part)])
    assert experts[order].tolist() == experts_of(counts)
    assert order.tolist() == sorted(range(len(experts)), key=lambda row: (experts[row], row))


@pytest.mark.parametrize("counts", [(2, 1), (2, 1, 0, 1), (1, 1, 2), (4, -1, 0), ()], ids=str)
def test_counts_that_do_not_match_the_rows_are_refused(counts: Counts) -> None:
    check_counts((2, 0, 1), experts=3, rows=3)
    with pytest.raises(RangeError, match="experts"):
        check_counts(counts, experts=3, rows=3)
