"""Where a provider that joins goes: the rule, against a search through everything, and what follows from it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from symbiosis_priv.layers import LayerRange
from symbiosis_priv.registry.coverage import most_needed

CAPACITIES = st.lists(st.sampled_from([0.0, 1.0, 2.0, 0.5]), min_size=1, max_size=12)


@given(capacities=CAPACITIES, length=st.integers(1, 15))
def test_no_other_range_is_needed_more(capacities: list[float], length: int) -> None:
    chosen = most_needed(capacities, length)
    wanted = min(length, len(capacities))
    assert chosen.last - chosen.first + 1 == wanted
    assert 0 <= chosen.first <= chosen.last < len(capacities)
    served = sorted(capacities[chosen.first : chosen.last + 1])
    for first in range(len(capacities) - wanted + 1):
        other = sorted(capacities[first : first + wanted])
        assert served <= other
        if served == other:
            assert chosen.first <= first  # everybody decides alike


@given(capacities=CAPACITIES, length=st.integers(1, 15))
def test_a_layer_that_nobody_serves_goes_first(capacities: list[float], length: int) -> None:
    chosen = most_needed(capacities, length)
    if 0.0 in capacities:
        assert 0.0 in capacities[chosen.first : chosen.last + 1]


@given(layers=st.integers(1, 40), length=st.integers(1, 12))
def test_providers_that_come_one_after_the_other_cover_everything(layers: int, length: int) -> None:
    """As many as it takes, and no layer is left out while another one is served twice as often as it must be."""
    capacities = [0.0] * layers
    for _ in range(2 * math.ceil(layers / length)):
        chosen = most_needed(capacities, length)
        for layer in range(chosen.first, chosen.last + 1):
            capacities[layer] += 1
    assert min(capacities) >= 1


def test_a_gap_is_filled_exactly() -> None:
    assert most_needed([1, 1, 0, 0, 1, 1], 2) == LayerRange(2, 3)
    assert most_needed([1, 1, 0, 0, 1, 1], 3) == LayerRange(1, 3)
    assert most_needed([3, 2, 2, 1], 2) == LayerRange(2, 3)
    assert most_needed([1, 1, 1], 9) == LayerRange(0, 2)
