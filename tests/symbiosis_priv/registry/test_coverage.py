"""The choice of layers for a new provider, compared with an exhaustive search, and its consequences."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.registry.coverage import Served, coverage, most_needed
from tests.vouching import Vouching

NOBODY = Served()
SERVED = st.lists(
    st.just(NOBODY) | st.builds(Served, st.integers(1, 2), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=12
)


@given(layers=SERVED, length=st.integers(1, 15))
def test_no_other_range_is_served_less(layers: list[Served], length: int) -> None:
    chosen = most_needed(layers, length)
    wanted = min(length, len(layers))
    assert chosen.last - chosen.first + 1 == wanted
    assert 0 <= chosen.first <= chosen.last < len(layers)
    served = sorted(layers[chosen.first : chosen.last + 1])
    for first in range(len(layers) - wanted + 1):
        other = sorted(layers[first : first + wanted])
        assert served <= other
        if served == other:
            assert chosen.first <= first  # all providers decide alike


@given(layers=SERVED, length=st.integers(1, 15))
def test_an_unserved_layer_is_chosen_first(layers: list[Served], length: int) -> None:
    chosen = most_needed(layers, length)
    if NOBODY in layers:
        assert NOBODY in layers[chosen.first : chosen.last + 1]


@given(layers=st.integers(1, 40), length=st.integers(1, 12))
def test_providers_that_join_one_after_the_other_cover_all_layers(layers: int, length: int) -> None:
    """Enough providers cover all layers: none is left out while another layer is served twice as often as necessary."""
    capacities = [0.0] * layers
    for _ in range(2 * math.ceil(layers / length)):
        chosen = most_needed([Served(1, capacity) for capacity in capacities], length)
        for layer in range(chosen.first, chosen.last + 1):
            capacities[layer] += 1
    assert min(capacities) >= 1


def test_a_gap_is_filled_exactly() -> None:
    def chosen(capacities: list[float], length: int) -> LayerRange:
        return most_needed([Served(1, capacity) for capacity in capacities], length)

    assert chosen([1, 1, 0, 0, 1, 1], 2) == LayerRange(2, 3)
    assert chosen([1, 1, 0, 0, 1, 1], 3) == LayerRange(1, 3)
    assert chosen([3, 2, 2, 1], 2) == LayerRange(2, 3)
    assert chosen([1, 1, 1], 9) == LayerRange(0, 2)


@pytest.mark.parametrize("lied_about", ["0-3", "4-7"])
def test_a_huge_claimed_capacity_keeps_no_other_provider_away(vouching: Vouching, lied_about: str) -> None:
    """Some of four other providers, each with room for half of the model, also choose the layers of the claimant."""
    layers = LayerRange.parse(lied_about)
    there = [vouching.said("liar", layers=lied_about, capacity=1e9)]
    for name in ("gamma", "delta", "epsilon", "zeta"):
        chosen = most_needed(coverage(8, there), 4)
        there.append(vouching.said(name, layers=str(chosen)))
    served = coverage(8, there[1:])
    assert all(served[layer].operators for layer in range(layers.first, layers.last + 1))


def test_a_claimed_capacity_counts_up_to_four_times_the_median(vouching: Vouching) -> None:
    there = [
        vouching.said(name, layers="0", capacity=capacity)
        for name, capacity in (("gamma", 1.0), ("delta", 2.0), ("liar", 1e9))
    ]
    assert coverage(2, there) == [Served(2, 1.0 + 2.0 + 8.0), NOBODY]
    leaving = vouching.said("epsilon", layers="0-1", draining=True)
    assert coverage(2, [*there, leaving]) == coverage(2, there)
    assert coverage(1, []) == [NOBODY]
