"""Freivalds' check over the integers, and attribution modulo 2^32: true products pass, wrong ones do not."""

import itertools

import torch
from hypothesis import given, strategies as st
from torch import Tensor

from symbiosis_priv.arithmetic.modular import PRIME, dot
from symbiosis_priv.arithmetic.quantise import QuantisedGroup
from symbiosis_priv.arithmetic.ring import BACKWARD, DIRECTIONS, FORWARD, Direction, quantise_rows
from symbiosis_priv.arithmetic.segments import Counts, segments
from symbiosis_priv.checkpoints.layers import Joined
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.kernels import RingMatrix
from symbiosis_priv.limits import GroupIndex
from tenant.core.blame import DEFAULT_COLUMNS, BlameKeys
from tenant.core.verifier import VerificationKeys
from tests import drawn
from tests.stacks import expert_counts, expert_product

GROUP, OTHER = GroupIndex(0), GroupIndex(1)


def keys_of(weight: Tensor) -> VerificationKeys:
    keys = VerificationKeys.fresh()
    keys.add(GROUP, weight)
    return keys


def blame_of(weight: Tensor, *, bits: int = 12, columns: int = 16) -> BlameKeys:
    keys = BlameKeys.fresh(columns=columns)
    keys.add(GROUP, weight, weight_bits=bits)
    return keys


def passed(keys: VerificationKeys, direction: Direction, *, rows: Tensor, product: Tensor) -> list[bool]:
    """The verdict on every row."""
    r, v = keys[GROUP, direction]
    return (dot(product, r) == dot(rows, v)).tolist()


@st.composite
def weights(draw: st.DrawFn) -> tuple[Tensor, int]:
    outputs, inputs, bits = draw(drawn.widths()), draw(drawn.widths()), draw(drawn.weight_bits())
    return draw(drawn.integer_weights(outputs=outputs, inputs=inputs, bits=bits)), bits


Case = tuple[Tensor, Tensor, Tensor, Direction]


@st.composite
def quantised(draw: st.DrawFn) -> Case:
    """(weight, rows as a tenant quantises them, their product over the integers, direction)"""
    weight, _ = draw(weights())
    direction = draw(testing.directions())
    group = QuantisedGroup(weight, torch.ones(len(weight), dtype=torch.float64), None)
    bound = group.bounds()[direction]
    floats = draw(testing.float_rows(width=bound.inputs, count=st.integers(1, 5)))
    rows, _ = quantise_rows(floats, bound)
    product = rows.long() @ (weight.t() if direction == FORWARD else weight).long()
    assert torch.equal(product, product.to(torch.int32).long())
    return weight, rows, product.to(torch.int32), direction


@st.composite
def residues(draw: st.DrawFn) -> Case:
    """(weight, any rows of the ring, their product modulo 2^32, direction)"""
    weight, bits = draw(weights())
    direction = draw(testing.directions())
    rows = draw(testing.ring_rows(width=weight.shape[1 if direction == FORWARD else 0]))
    product = RingMatrix(weight, weight_bits=bits).product(rows, direction)
    return weight, rows, product, direction


def with_an_error(data: st.DataObject, product: Tensor, valuation: int) -> Tensor:
    """A product with an error of this 2-adic valuation in one entry."""
    place, lie = data.draw(st.integers(0, product.numel() - 1)), product.long()
    lie.view(-1)[place] += ((2 * data.draw(st.integers(0, 2**31 - 1)) + 1) << valuation) % 2**32
    return lie.to(torch.int32)


# The check


@given(quantised(), st.data(), st.integers(0, 31))
def test_a_wrong_entry_never_passes(case: Case, data: st.DataObject, valuation: int) -> None:
    """Any error modulo 2^32, of any 2-adic valuation, also if it wraps, and errors in many entries."""
    weight, rows, product, direction = case
    many = product + data.draw(testing.ring_rows(width=product.shape[1], count=len(product)))
    for lie in (with_an_error(data, product, valuation), many):
        verdicts = passed(keys_of(weight), direction, rows=rows, product=lie)
        assert verdicts == (lie == product).all(dim=1).tolist()


def test_keys_are_fresh_and_differ_by_layer_and_direction() -> None:
    weight = torch.ones(8, 8, dtype=torch.int16)
    columns = []
    for _ in range(2):
        keys = keys_of(weight)
        keys.add(OTHER, weight)
        for place in itertools.product((GROUP, OTHER), DIRECTIONS):
            columns.append(keys[place][0].values.numpy().tobytes())
    assert len(columns) == len(set(columns)) == 8


def test_residues_are_secret_and_uniform() -> None:
    """Small or sparse columns could be learned by probing. Every bit is fair; the false-alarm rate is below 1e-12."""
    column, _ = keys_of(torch.ones(8, 1 << 15, dtype=torch.int16))[GROUP, "backward"]
    values = column.values
    assert len(values) == 1 << 15
    assert 0 <= int(values.min()) <= int(values.max()) < PRIME
    for bit in range(61):
        ones = int((values >> bit & 1).sum())
        assert abs(ones - len(values) / 2) < 7.2 * (len(values) / 4) ** 0.5


# Stacks of experts

StackCase = tuple[Tensor, VerificationKeys, Counts, Tensor, Tensor, Direction, Joined]


@st.composite
def stacked(draw: st.DrawFn) -> StackCase:
    """(dense weight, its keys, counts, small rows, their products by expert, direction, how experts are joined)"""
    experts, height, width = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(drawn.widths())
    joined: Joined = draw(st.sampled_from(["outputs", "inputs"]))
    packed = draw(drawn.integer_weights(outputs=experts * height, inputs=width, bits=10))
    weight = packed if joined == "outputs" else packed.t()
    direction: Direction = draw(testing.directions())
    counts = draw(expert_counts(experts, most=3))
    of_result = (direction == FORWARD) == (joined == "outputs")
    rows = draw(testing.ring_rows(width=width if of_result else height, count=sum(counts))) >> 16
    keys = VerificationKeys.fresh()
    keys.add_stack(GROUP, weight, experts=experts, transposed=joined == "inputs")
    return weight, keys, counts, rows, expert_product(weight, counts, rows, direction, joined), direction, joined


def passed_by_expert(
    keys: VerificationKeys, counts: Counts, direction: Direction, rows: Tensor, product: Tensor
) -> list[bool]:
    r, v = keys.expert_columns(GROUP, direction)
    verdicts: list[bool] = []
    for expert, segment in segments(counts):
        verdicts += (dot(product[segment].contiguous(), r) == dot(rows[segment].contiguous(), v[expert])).tolist()
    return verdicts


@given(stacked(), st.data(), st.integers(0, 31))
def test_a_wrong_entry_of_a_stack_never_passes(case: StackCase, data: st.DataObject, valuation: int) -> None:
    _, keys, counts, rows, product, direction, _ = case
    if not product.numel():
        return
    lie = with_an_error(data, product, valuation)
    verdicts = passed_by_expert(keys, counts, direction, rows, lie)
    assert verdicts == (lie == product).all(dim=1).tolist()


@given(stacked(), st.integers(1, 2**31 - 1))
def test_an_error_that_cancels_over_experts_does_not_pass(case: StackCase, error: int) -> None:
    """Experts share R: checked with R for every expert, errors of two experts could cancel."""
    weight, keys, counts, _, _, _, joined = case
    experts = len(counts)
    if experts == 1:
        return
    direction: Direction = FORWARD if joined == "outputs" else BACKWARD
    width, outputs = weight.shape[::-1] if direction == FORWARD else weight.shape
    lie = torch.zeros(1, outputs, dtype=torch.int32)
    lie[0, 0], lie[0, outputs // experts] = error, -error
    assert passed(keys, direction, rows=torch.zeros(1, width, dtype=torch.int32), product=lie) == [False]


@given(stacked())
def test_keys_of_several_experts_are_not_interchangeable(case: StackCase) -> None:
    """Rows of one expert, answered with the matrix of another one, are refused where the products differ."""
    weight, keys, counts, rows, product, direction, joined = case
    moved = (*counts[1:], counts[0])
    other = expert_product(weight, moved, rows, direction, joined)
    verdicts = passed_by_expert(keys, counts, direction, rows, other)
    assert verdicts == (other == product).all(dim=1).tolist()


@given(stacked(), st.data(), st.integers(0, 29))
def test_a_wrong_answer_of_a_stack_is_attributed(case: StackCase, data: st.DataObject, valuation: int) -> None:
    """The V of stacks are made from the weights when they are needed."""
    weight, _, counts, rows, product, direction, joined = case
    turned = joined == "inputs"

    def read() -> RingMatrix:
        packed = weight.t().contiguous() if turned else weight
        return RingMatrix(packed, weight_bits=10, height=len(packed) // len(counts)).as_stack(
            len(counts), transposed=turned
        )

    blame = BlameKeys.fresh(columns=16, stacks={GROUP: read})
    assert blame.accepts(GROUP, direction, rows=rows, answer=product, counts=counts)
    if product.numel():
        lie = with_an_error(data, product, valuation)
        assert not blame.accepts(GROUP, direction, rows=rows, answer=lie, counts=counts)
    assert not blame.products


# Attribution


@given(residues(), st.data(), st.integers(0, 29))
def test_a_wrong_answer_is_attributed(case: Case, data: st.DataObject, valuation: int) -> None:
    """Errors of valuation 30 or 31 may pass, once in 2^32 or 2^16 times; then all participants are suspects."""
    weight, rows, product, direction = case
    if product.numel():
        lie = with_an_error(data, product, valuation)
        assert not blame_of(weight).accepts(GROUP, direction, rows=rows, answer=lie)


def test_the_default_keys_miss_an_error_of_half_the_ring_once_in_65536_times() -> None:
    """Of 256 such errors, two are missed with a probability below 10^-5."""
    weight, rows = torch.ones(64, 2, dtype=torch.int16), torch.ones(1, 2, dtype=torch.int32)
    missed = 0
    for _ in range(4):
        keys = BlameKeys.fresh(columns=DEFAULT_COLUMNS)
        keys.add(GROUP, weight, weight_bits=10)
        for place in range(64):
            lie = torch.full((1, 64), 2, dtype=torch.int32)
            lie[0, place] ^= -(1 << 31)
            missed += keys.accepts(GROUP, FORWARD, rows=rows, answer=lie)
    assert missed <= 1


@given(residues())
def test_another_shape_or_dtype_is_a_fault(case: Case) -> None:
    weight, rows, product, direction = case
    keys = blame_of(weight)
    wider = torch.nn.functional.pad(product, (0, 1))
    longer = torch.nn.functional.pad(product, (0, 0, 0, 1))
    for wrong in (wider, longer, product[:, 1:], product.to(torch.int64), product.to(torch.float32)):
        assert not keys.accepts(GROUP, direction, rows=rows, answer=wrong)


def test_columns_are_uniform_over_the_whole_ring() -> None:
    """The false-alarm rate is below 1e-12 for each bit."""
    r = blame_of(torch.ones(8, 2048, dtype=torch.int16))._expand(GROUP, "backward", rows=2048)
    assert r.shape == (2048, 16)
    for bit in range(32):
        ones = int((r >> bit & 1).sum())
        assert abs(ones - r.numel() / 2) < 7.2 * (r.numel() / 4) ** 0.5


def test_nothing_secret_is_printed() -> None:
    weight = torch.ones(2, 2, dtype=torch.int16)
    assert repr(keys_of(weight)) == "VerificationKeys(2 products)"
    assert repr(blame_of(weight)) == "BlameKeys(16 columns)"
