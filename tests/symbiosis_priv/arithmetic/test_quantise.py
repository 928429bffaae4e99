"""Quantising weights: error bounds, determinism, and what the digest covers."""

import hashlib
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic.quantise import Layer, Stack, quantise
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.errors import CheckpointError, ConfigError
from symbiosis_priv.harness import strategies as testing
from tests import drawn
from tests.builds import BUILDS, build
from tests.experts import join


def layer(weight: Tensor, bias: Tensor | None = None) -> Layer:
    return Layer("layer", weight, bias)


@given(drawn.layers(), drawn.weight_bits())
def test_error_is_half_a_step_per_channel(members: list[Layer], bits: int) -> None:
    group = quantise(members, weight_bits=bits)
    peak = 2 ** (bits - 1) - 1
    stacked = torch.cat([member.weight.double() for member in members])
    assert group.weight.shape == stacked.shape
    for weights, integers, step in zip(stacked, group.weight, group.channel_scale.tolist(), strict=True):
        largest = weights.abs().max().item()
        scale = Fraction(step)
        assert integers.abs().max() <= peak
        if step == 1.0 and largest < 1e-300:  # a zero channel, or one that float32 cannot tell from it
            assert not integers.any()
            continue
        assert integers.abs().max() == peak  # the whole range is used
        for w, q in zip(weights.tolist(), integers.tolist(), strict=True):
            # dividing by the scale rounds once: 1 eps of |w|
            assert abs(Fraction(w) - q * scale) <= scale / 2 + abs(Fraction(w)) * Fraction(2) ** -52


@given(drawn.layers(), drawn.weight_bits(), testing.directions())
def test_the_bound_holds_the_true_norms(members: list[Layer], bits: int, direction: Direction) -> None:
    group = quantise(members, weight_bits=bits)
    bound = group.bounds()[direction]
    rows = group.weight.tolist() if direction == "forward" else group.weight.t().tolist()
    assert bound.inputs == len(rows[0])
    assert bound.weight_absmax == max(abs(w) for row in rows for w in row)
    squared = max(sum(w * w for w in row) for row in rows)
    assert math.isclose(bound.weight_norm, math.sqrt(squared), rel_tol=1e-15)


def test_subnormal_channels_do_not_leave_the_integer_range() -> None:
    """Half-way between two subnormal numbers, the scale is off by a third: 189 / 127 would be stored as 1."""
    weight = torch.full((1, 4), 189 * 5e-324, dtype=torch.float64)
    assert quantise([layer(weight)], weight_bits=8).weight.abs().max() <= 127


@given(drawn.layers(), st.data())
def test_the_digest_covers_every_bit(members: list[Layer], data: DataObject) -> None:
    group = quantise(members)
    parts = {"weight": group.weight, "channel_scale": group.channel_scale, "bias": group.bias}
    name = data.draw(st.sampled_from([name for name, tensor in parts.items() if tensor is not None]))
    tensor = parts[name]
    assert tensor is not None
    changed = tensor.clone()
    octets = changed.view(torch.uint8).view(-1)
    octets[data.draw(st.integers(0, len(octets) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    before = group.digest()
    assert replace(group, **{name: changed}).digest() != before
    assert group.digest() == before


def test_the_digest_follows_its_specification() -> None:
    """SHA-256 of name, dtype, shape and little-endian values, in this order, so that other programs can compute it."""
    group = quantise([layer(torch.tensor([[1.0, -0.25, 0.1], [0.0, 0.0, 0.0]]), torch.tensor([0.5, -1.5]))])
    stream = b'["weight","<i2",[2,3]]' + struct.pack("<6h", 511, -128, 51, 0, 0, 0)
    stream += b'["channel_scale","<f8",[2]]' + struct.pack("<2d", 1 / 511, 1.0)
    stream += b'["bias","<f4",[2]]' + struct.pack("<2f", 0.5, -1.5)
    assert group.digest() == hashlib.sha256(stream).hexdigest()


def test_threads_and_layout_change_nothing(set_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix has enough weights for several threads."""
    monkeypatch.setattr(native, "_SHARE", 1 << 14)
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(70, 2100, generator=generator), torch.randn(70, generator=generator)
    digests, bounds = set(), set()
    for name in BUILDS:
        with build(name):
            for threads in (1, 2, 5):
                set_threads(threads)
                for same in (weight, weight.t().contiguous().t(), torch.cat([weight, weight], dim=1)[:, 2100:]):
                    group = quantise([layer(same, bias)])
                    digests.add(group.digest())
                    bounds.add(tuple(group.bounds().values()))
    assert len(digests) == len(bounds) == 1


@given(drawn.layers(), drawn.weight_bits())
def test_every_build_gives_the_same_bits(members: list[Layer], bits: int) -> None:
    """A digest is pinned in federation files, so it must not depend on a compiler."""
    seen = set()
    for name in BUILDS:
        with build(name):
            group = quantise(members, weight_bits=bits)
            seen.add((group.digest(), *group.bounds().values()))
    assert len(seen) == 1


@pytest.mark.parametrize("name", BUILDS)
def test_a_bad_weight_is_found_in_any_row(name: str) -> None:
    for row in (0, 150, 299):
        weight = torch.ones(300, 3000)
        weight[row, row] = math.inf
        with build(name), pytest.raises(CheckpointError, match="weight of layer "):
            quantise([layer(torch.ones(2, 3000)), layer(weight)])


@given(drawn.layers(dtypes=[torch.bfloat16, torch.float16]))
def test_the_storage_dtype_changes_nothing(members: list[Layer]) -> None:
    """A bf16 checkpoint and its exact float32 copy are the same model."""
    wider = [Layer(m.name, m.weight.float(), None if m.bias is None else m.bias.float()) for m in members]
    assert quantise(members).digest() == quantise(wider).digest()


@given(drawn.layers(members=3))
def test_siblings_are_stacked_in_order(members: list[Layer]) -> None:
    group = quantise(members)
    alone = [quantise([member]) for member in members]
    assert torch.equal(group.weight, torch.cat([one.weight for one in alone]))
    assert torch.equal(group.channel_scale, torch.cat([one.channel_scale for one in alone]))
    if any(member.bias is not None for member in members):
        biases = [torch.zeros(len(m.weight)) if m.bias is None else m.bias.float() for m in members]
        assert group.bias is not None
        assert torch.equal(group.bias, torch.cat(biases))
    else:
        assert group.bias is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["weight", "bias"])
def test_non_finite_parameters_are_refused_by_name(where: str, bad: float) -> None:
    parameters = {"weight": torch.ones(3, 4), "bias": torch.ones(3)}
    parameters[where].view(-1)[-1] = bad
    with pytest.raises(CheckpointError, match=f"{where} of model.layers.7 "):
        quantise([Layer("model.layers.7", parameters["weight"], parameters["bias"])])


def test_layers_that_do_not_fit_and_weight_bits_outside_the_proof_are_refused() -> None:
    with pytest.raises(CheckpointError, match="share"):
        quantise([layer(torch.ones(3, 4)), layer(torch.ones(3, 5))])
    with pytest.raises(CheckpointError, match="length"):
        quantise([layer(torch.ones(3, 4), torch.ones(4))])
    for bits in (-1, 0, 3, 13, 32):
        with pytest.raises(ConfigError, match=str(bits)):
            quantise([layer(torch.ones(3, 4))], weight_bits=bits)


@given(
    experts=st.integers(1, 4),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    joined=st.sampled_from(["outputs", "inputs"]),
    bits=drawn.weight_bits(),
    data=st.data(),
)
def test_a_stack_that_is_read_matrix_by_matrix_is_the_same_as_its_whole_matrix(
    experts: int, shape: tuple[int, int], joined: Any, bits: int, data: DataObject
) -> None:
    stack = data.draw(testing.float_rows(count=experts * shape[0], width=shape[1])).unflatten(0, (experts, -1))
    reads = [partial(stack.__getitem__, index) for index in range(experts)]
    whole = join(stack, joined=joined, transposed=False)
    lazy = Stack("stack", (whole.shape[0], whole.shape[1]), reads, joined)
    assert torch.equal(lazy.weight, whole)
    alone, joint = (quantise([one], weight_bits=bits) for one in (lazy, layer(whole)))
    assert alone.digest() == joint.digest()
    for wrong in (math.inf, -math.inf, math.nan):
        stack.view(-1)[data.draw(st.integers(0, stack.numel() - 1))] = wrong
        with pytest.raises(CheckpointError, match="the weight of stack holds inf or nan"):
            quantise([lazy], weight_bits=bits)
