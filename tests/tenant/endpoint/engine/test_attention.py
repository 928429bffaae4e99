import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from symbiosis_priv import native
from tenant.endpoint.engine.attention import Attention
from tenant.endpoint.engine.kv import BLOCK, KeyValues, Shape
from tests.builds import switched

LENGTHS = st.one_of(st.integers(1, 40), st.integers(BLOCK - 1, BLOCK + 2), st.integers(2 * BLOCK, 2 * BLOCK + 20))


needs_library = pytest.mark.skipif(native.library() is None, reason="installed without a C compiler")
paths = pytest.mark.parametrize("path", [pytest.param("1", marks=needs_library), "0"], ids=["native", "torch"])


def put(kv: KeyValues, keys: Tensor, values: Tensor) -> None:
    """Append keys and values to an empty sequence of one layer, a third of them first."""
    done = 0
    for tokens in (len(keys) // 3, len(keys) - len(keys) // 3):
        kv.grow(tokens)
        Attention([(kv, tokens)]).append(0, keys[done:][:tokens], values[done:][:tokens])
        done += tokens


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, KeyValues, dict[str, Any]]:
    """Queries of a whole sequence, its keys and values, and options of `attend`."""
    heads_kv, group, width = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 8, 17])), draw(st.integers(1, 40))
    length, size = draw(LENGTHS), draw(st.sampled_from([0.01, 1.0, 8.0]))
    torch.manual_seed(draw(st.integers(0, 2**32)))
    shape = Shape(windows=(None,), heads=heads_kv, key_width=width, value_width=width + 3, dtype=torch.float32)
    kv = KeyValues(shape)
    put(kv, size * torch.randn(length, heads_kv, width), torch.randn(length, heads_kv, width + 3))
    heads = heads_kv * group
    options = {
        "scaling": draw(st.sampled_from([1.0, width**-0.5])),
        "window": draw(st.one_of(st.none(), st.integers(1, length + 1))),
        "softcap": draw(st.sampled_from([None, 0.5, 30.0])),
        "sinks": draw(st.sampled_from([None, 4 * torch.randn(heads)])),
    }
    return torch.randn(length, heads, width), kv, options


def attend(queries: Tensor, kv: KeyValues, **options: Any) -> Tensor:
    """Attention of the last tokens of a sequence, whose keys and values are there."""
    return Attention([(kv, len(queries))]).attend(0, queries, **options)


def oracle(
    queries: Tensor, kv: KeyValues, *, scaling: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """The attention of transformers' eager functions, of a whole sequence, in float64."""
    tokens, heads, _ = queries.shape
    keys, values = (
        torch.cat([keys for keys, _ in kv.blocks(0).values()], 2),
        torch.cat([values for _, values in kv.blocks(0).values()], 1),
    )
    keys, values = (
        part.double().repeat_interleave(heads // len(part), 0) for part in (keys[..., :tokens], values[:, :tokens])
    )
    scores = queries.double().transpose(0, 1) @ keys * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    place = torch.arange(tokens)
    seen = place <= place[:, None]
    if window is not None:
        seen &= place > place[:, None] - window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, tokens, 1)], -1)
    return (scores.softmax(-1)[..., :tokens] @ values).transpose(0, 1)


@given(case=cases())
@settings(max_examples=20)
def test_attention_is_that_of_transformers(case: tuple[Tensor, KeyValues, dict[str, Any]]) -> None:
    """Bound, with u = 2^-24. A score of size S has an error of (width + 8) u S, and twice that as a factor of a weight.
    Numerator and denominator are sums of `length` terms, rescaled once per block: 2 (length + 4 blocks + 16) u."""
    queries, kv, options = case
    (length, _, width), blocks = queries.shape, kv.blocks(0).values()
    expected = oracle(queries, kv, **options)
    sizes = (
        torch.cat([keys for keys, _ in blocks], 2).norm(dim=1).amax() * queries.norm(dim=-1).amax() * options["scaling"]
    )
    factors = 2 * (width + 8) * sizes + 2 * (length + 4 * len(blocks) + 16)
    bound = 1.1 * 2**-24 * factors * torch.cat([values for _, values in blocks], 1).abs().amax()
    for path in "01":  # torch, and the compiled library if it is there
        with switched(SYMBIOSIS_PRIV_NATIVE=path):
            assert (attend(queries, kv, **options) - expected).abs().amax() <= bound


@paths
@given(case=cases(), data=st.data())
@settings(max_examples=20)
def test_a_row_has_the_same_bits_in_every_chunk_and_beside_other_sequences(
    path: str, case: tuple[Tensor, KeyValues, dict[str, Any]], data: st.DataObject
) -> None:
    queries, kv, options = case
    length = len(queries)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=6))})
    with switched(SYMBIOSIS_PRIV_NATIVE=path):
        together = attend(queries, kv, **options)
        for start, end in itertools.pairwise(cuts):
            chunk = attend(queries[start:end], kv.prefix(end), **options)
            assert torch.equal(chunk, together[start:end])
        ends = sorted({length, *data.draw(st.lists(st.integers(1, length), max_size=3))})
        one_each = Attention([(kv.prefix(end), 1) for end in ends])
        last = one_each.attend(0, torch.stack([queries[end - 1] for end in ends]), **options)
    assert torch.equal(last, torch.stack([together[end - 1] for end in ends]))


@needs_library
@given(case=cases())
@settings(max_examples=10)
def test_all_instruction_sets_give_the_same_bits(case: tuple[Tensor, KeyValues, dict[str, Any]]) -> None:
    queries, kv, options = case
    results = []
    for isa in native.isas():
        with switched(SYMBIOSIS_PRIV_ISA=isa.name.lower()):
            results.append(attend(queries, kv, **options))
    assert all(torch.equal(result, results[0]) for result in results)


def test_half_precision_is_computed_in_float32() -> None:
    torch.manual_seed(0)
    shape = Shape(windows=(None,), heads=2, key_width=16, value_width=16, dtype=torch.bfloat16)
    half, full = KeyValues(shape), KeyValues(replace(shape, dtype=torch.float32))
    keys, values, queries = (torch.randn(20, heads, 16).bfloat16() for heads in (2, 2, 4))
    put(half, keys, values)
    put(full, keys.float(), values.float())
    found = attend(queries, half, scaling=0.25)
    assert torch.equal(found, attend(queries.float(), full, scaling=0.25).bfloat16())
