"""Layer numbers, and ranges of layers as contiguous ranges of groups."""

import itertools

import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.checkpoints.layers import LayerRange, layers_of, spans, whole_layers
from symbiosis_priv.errors import ConfigError
from tests.cases import cases

_parts = st.sampled_from(["model", "layers", "0", "1", "2", "17", "q_proj", "q_proj+2", "3+1", "lm_head"])
names = st.lists(st.lists(_parts, min_size=1, max_size=5).map(".".join), min_size=1, max_size=30)
ranges = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: LayerRange(min(pair), max(pair)))


@cases(__file__, "blocks")
def test_blocks_are_counted_in_the_manifests_order(group_names: list[str], layers: list[int]) -> None:
    assert [*layers_of(group_names)] == layers


@given(names)
def test_layers_begin_at_0_and_grow_by_one(group_names: list[str]) -> None:
    layers = layers_of(group_names)
    assert layers[0] == 0
    assert all(after - before in (0, 1) for before, after in itertools.pairwise(layers))


@given(names, ranges)
def test_a_range_of_layers_is_one_range_of_groups(group_names: list[str], wanted: LayerRange) -> None:
    layers = layers_of(group_names)
    if wanted.last > layers[-1]:
        with pytest.raises(ConfigError, match=f"'{wanted}' goes beyond this model, whose layers are"):
            wanted.groups(layers)
        return
    groups = wanted.groups(layers)
    assert [layers[group] in wanted for group in range(len(layers))] == [g in groups for g in range(len(layers))]
    assert whole_layers(groups, layers) == tuple(range(wanted.first, wanted.last + 1))


@given(ranges)
def test_a_range_survives_writing_and_parsing(wanted: LayerRange) -> None:
    assert LayerRange.parse(str(wanted)) == wanted
    assert LayerRange.parse(f"{wanted.first}-{wanted.last}") == wanted


@pytest.mark.parametrize(
    "text", ["", "-", "15-0", "-1", "-1-3", "0-", "0–15", "0-15 ", " 0", "0-1-2", "٣", "auto", "1e3", "9" * 5000, "0\n"]
)
def test_invalid_ranges_are_config_errors_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"as in '?0-15"):
        LayerRange.parse(text)


@given(st.sets(st.integers(0, 60)))
def test_spans_contain_exactly_the_numbers_and_are_not_adjacent(numbers: set[int]) -> None:
    found = spans(numbers)
    assert {n for span in found for n in range(span.first, span.last + 1)} == numbers
    assert all(before.last + 1 < after.first for before, after in itertools.pairwise(found))
