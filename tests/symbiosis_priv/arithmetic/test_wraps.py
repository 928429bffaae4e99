"""Wraps of a narrow ring: found with the verification keys, or not corrected at all."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from symbiosis_priv.arithmetic import wraps
from symbiosis_priv.arithmetic.keystream import StreamKey
from symbiosis_priv.arithmetic.modular import Column, dot, uniform
from symbiosis_priv.arithmetic.ring import Bound, quantise_rows
from symbiosis_priv.arithmetic.segments import Counts, check_counts, clip, merge, pick, segments
from symbiosis_priv.errors import RangeError
from tests import drawn
from tests.stacks import expert_counts

KEYS = StreamKey(bytes(range(32))), StreamKey(bytes(range(1, 33)))
HALF = 1 << 23
MOST = 3


@st.composite
def wrapped(draw: st.DrawFn, entries: st.SearchStrategy[int]) -> tuple[Tensor, Tensor]:
    """The residues y, and the true product t, of which so many entries left the ring."""
    width = draw(drawn.widths(largest=90))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    y = torch.randint(-HALF, HALF, (width,), dtype=torch.int32, generator=generator)
    t = y.clone()
    for place in torch.randperm(width, generator=generator)[: draw(entries)].tolist():
        t[place] += draw(st.integers(1, MOST)) * draw(st.sampled_from([-1, 1])) << 24
    return y, t


def corrected(y: Tensor, t: Tensor, columns: tuple[Column, Column] | None = None) -> Tensor | None:
    first, second = columns or (uniform(KEYS[0], len(y)), uniform(KEYS[1], len(y)))
    corrector, expected = wraps.Corrector(first, ring_bits=24, most=MOST), int(dot(t[None], first))
    return corrector.corrected(y, expected, (second, int(dot(t[None], second))))


@given(wrapped(st.integers(0, 6)))
def test_up_to_two_wrapped_entries_are_corrected_and_no_more(pair: tuple[Tensor, Tensor]) -> None:
    y, t = pair
    got, count = corrected(y, t), int((y != t).sum())
    assert (got is None) == (count > wraps.MOST_ENTRIES)
    assert got is None or torch.equal(got, t)
    assert wraps.uncorrectable(t[None], ring_bits=24) == ([0] if count > wraps.MOST_ENTRIES else [])


@given(wrapped(st.integers(0, 3)), st.integers(1, 5))
def test_one_wrapped_entry_is_found_in_many_rows_at_once(pair: tuple[Tensor, Tensor], copies: int) -> None:
    """No entry, one entry or several entries of a row wrapped."""
    y, t = pair
    generator = torch.Generator().manual_seed(copies)
    places = torch.randint(len(y), (copies,), generator=generator)
    true = torch.cat([t[None], y.repeat(copies, 1)])
    true[torch.arange(1, copies + 1), places] -= MOST << 24
    rows = torch.cat([y[None], y.repeat(copies, 1)])
    column = uniform(KEYS[0], len(y))
    found, got = wraps.Corrector(column, ring_bits=24, most=MOST).one_entry(rows, dot(true, column))
    assert found == [row for row in range(copies + 1) if (rows[row] != true[row]).sum() == 1]
    assert torch.equal(got, true[found])


@given(wrapped(st.integers(0, 2)), st.data())
def test_an_error_is_never_taken_for_wraps(pair: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    """An error of any valuation below 2^24, also 2^23, beside wraps."""
    y, t = pair
    lie = y.clone()
    for place in data.draw(st.sets(st.integers(0, len(y) - 1), min_size=1, max_size=3)):
        error = data.draw(st.one_of(st.integers(0, 23).map(lambda v: 1 << v), st.integers(1, 2**24 - 1)))
        lie[place] = (int(lie[place]) + error + HALF) % (2 * HALF) - HALF
    assert corrected(lie, t) is None


def test_the_second_column_decides_between_explanations() -> None:
    """Planted: R has the same entry twice, so the first column cannot tell which entry wrapped."""
    y = torch.zeros(9, dtype=torch.int32)
    t = y.clone()
    t[7] += 1 << 24
    values = uniform(KEYS[0], 9).values.clone()
    values[7] = values[2]
    got = corrected(y, t, (Column(values), uniform(KEYS[1], 9)))
    assert got is not None
    assert torch.equal(got, t)
    other = uniform(KEYS[1], 9)
    corrector, expected = wraps.Corrector(Column(values), ring_bits=24, most=MOST), int(dot(t[None], Column(values)))
    assert corrector.corrected(y, expected, (other, int(dot(y[None], other)) + 1)) is None


@given(
    st.integers(1, 3000), st.integers(1, 511), st.floats(1.0, 24.0), st.integers(0, 2**32), st.sampled_from([0.0, 4.0])
)
def test_a_narrow_bound_holds(width: int, absmax: int, spread: float, seed: int, heavy: float) -> None:
    """No product of a row is beyond `reach`, wraps more than `most_wraps` times, or wraps at the smallest scale."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-absmax, absmax + 1, (5, width), generator=generator)
    norm = math.sqrt(int(weight.square().sum(dim=1).max()))
    rows = torch.randn(3, width, generator=generator).double()
    rows = torch.cat([rows * (heavy * rows).exp(), weight[:1].double(), -weight[1:2].double()])
    bound = Bound(width, int(weight.abs().max()), norm, 24, spread)
    while True:
        xq, scale = quantise_rows(rows, bound)
        t = xq.long() @ weight.t()
        assert int(t.abs().max()) <= bound.reach < 2**31
        assert int(((t + HALF) >> 24).abs().max()) <= bound.most_wraps
        assert torch.allclose(xq * scale, rows, atol=float(scale.max()))
        if not bound.most_wraps:
            return
        try:
            bound = bound.halved()
        except RangeError:
            return


def test_a_wide_layer_has_a_scale_at_which_no_product_wraps() -> None:
    """Rounding could leave the range by the bound on the 1-norm, so the bound on the 2-norm decides alone."""
    weight = torch.full((2, 40_000), 130)
    weight[0, 0] = 511
    bound = Bound(40_000, 511, math.sqrt(int(weight[0].square().sum())), 24)
    rows = torch.ones(1, 40_000)
    assert int((quantise_rows(rows, bound)[0].long() @ weight.t()).min()) >= HALF
    while bound.most_wraps:
        bound = bound.halved()
    assert bound.l1 == 0
    assert 0 < int((quantise_rows(rows, bound)[0].long() @ weight.t()).max()) < HALF


def test_rows_are_scaled_by_statistics() -> None:
    """At width 4096, a row in a ring of 24 bits keeps a rms of 2^6 and more; the worst case would leave 2^4."""
    norm = 150.0 * math.sqrt(4096)
    wide, narrow = Bound(4096, 511, norm), Bound(4096, 511, norm, 24)
    rows = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    rms = [quantise_rows(rows, bound)[0].double().square().mean().sqrt() for bound in (wide, narrow)]
    assert rms[0] > 1500
    assert rms[1] > 64
    assert narrow.most_wraps == 3
    assert wide.most_wraps == 0


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
