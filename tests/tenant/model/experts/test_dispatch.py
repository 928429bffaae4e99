"""Where rows stand in a request with counts, for any choice of experts."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tenant.model.experts.dispatch import AsRouted, Flat

EXPERTS = 5
CHOICES = st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=2, max_size=2), max_size=9).map(
    lambda pairs: torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
)


def rows_of(route: AsRouted, expert: int) -> range:
    start = sum(route.counts[:expert])
    return range(start, start + route.counts[expert])


@given(CHOICES)
def test_every_row_is_among_the_rows_of_its_expert(index: Tensor) -> None:
    for kind in (AsRouted, Flat):
        route = kind(index, experts=EXPERTS)
        places = route.places.tolist()
        assert len(set(places)) == len(places) == index.numel()
        for place, expert in zip(places, index.flatten().tolist(), strict=True):
            assert place in rows_of(route, expert)


@given(CHOICES)
def test_counts_are_as_routed_or_all_the_largest(index: Tensor) -> None:
    real = index.flatten().bincount(minlength=EXPERTS).tolist()
    assert AsRouted(index, experts=EXPERTS).counts == tuple(real)
    assert Flat(index, experts=EXPERTS).counts == (max(real),) * EXPERTS
