import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GemmaConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config
from transformers.activations import ACT2FN

from symbiosis_priv import native
from symbiosis_priv.native import linear
from tenant.endpoint.engine.attention import FEW, Attention
from tenant.endpoint.engine.kv import BLOCK, KeyValues, Shape, held_bytes
from tenant.endpoint.engine.packed_model import NextTokens, PackedModel
from tenant.tasks.row_blocks import ModuleBlocks, RowBlocks
from tests.builds import switched
from tests.compatibility.families import build
from tests.memory import OnGPU

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
    """And all instruction sets give the same bits. Bound, with u = 2^-24. A score of size S has an error of
    (width + 8) u S, and twice that as a factor of a weight. Numerator and denominator are sums of `length` terms,
    rescaled once per block: 2 (length + 4 blocks + 16) u."""
    queries, kv, options = case
    (length, _, width), blocks = queries.shape, kv.blocks(0).values()
    expected = oracle(queries, kv, **options)
    sizes = (
        torch.cat([keys for keys, _ in blocks], 2).norm(dim=1).amax() * queries.norm(dim=-1).amax() * options["scaling"]
    )
    factors = 2 * (width + 8) * sizes + 2 * (length + 4 * len(blocks) + 16)
    bound = 1.1 * 2**-24 * factors * torch.cat([values for _, values in blocks], 1).abs().amax()
    with switched(SYMBIOSIS_PRIV_NATIVE="0"):
        results = [attend(queries, kv, **options)]  # with torch
    for isa in native.isas():
        with switched(SYMBIOSIS_PRIV_ISA=isa.name.lower()):
            results.append(attend(queries, kv, **options))
    assert all((result - expected).abs().amax() <= bound for result in results)
    assert all(torch.equal(result, results[1]) for result in results[2:])


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


class _Counted(dict[int, tuple[Tensor, Tensor]]):
    """Blocks that note which of them are read."""

    def __init__(self, blocks: dict[int, tuple[Tensor, Tensor]], read: list[int]) -> None:
        super().__init__(blocks)
        self.read = read

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return super().__getitem__(index)


@needs_library
@given(case=cases(), data=st.data())
@settings(max_examples=20)
def test_on_a_gpu_few_tokens_take_the_library_and_a_prompt_copies_each_block_once(
    case: tuple[Tensor, KeyValues, dict[str, Any]], data: st.DataObject
) -> None:
    queries, kv, options = case
    ends = data.draw(st.lists(st.integers(1, len(queries)), min_size=1, max_size=3))
    new, copied = list[tuple[KeyValues, int]](), dict[int, list[int]]()
    for place, end in enumerate(ends):
        some = data.draw(st.one_of(st.integers(1, min(end, FEW + 1)), st.just(end)))
        own = kv.prefix(end)
        counted = _Counted(own.blocks(0), copied.setdefault(place, []))
        own.blocks = {0: counted}.__getitem__  # type: ignore[assignment]
        new.append((own, some))
    rows = [queries[end - some : end] for end, (_, some) in zip(ends, new, strict=True)]
    found = Attention(new).attend(0, torch.cat(rows).as_subclass(OnGPU), **options)
    for place, (part, (own, some)) in enumerate(zip(found.split([some for _, some in new]), new, strict=True)):
        with switched(SYMBIOSIS_PRIV_NATIVE="1" if some <= FEW else "0"):
            assert torch.equal(part, attend(rows[place], kv.prefix(own.length), **options))
        _, *blocks = copied[place] or [0]  # the first access reads the sizes
        assert len(blocks) == len({*blocks}) == (0 if some <= FEW else len({*copied[place]}))


# One pass of a model over tokens of many sequences


def test_a_prompt_read_in_chunks_has_the_bits_of_one_pass() -> None:
    """And the logits of transformers' own pass, in float64. There, fewer than 10^4 roundings of 2^-53 stand one after
    another behind a logit; norms and softmax enlarge an error less than a thousandfold."""
    length = 2 * BLOCK + 60
    sizes = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    more = {"max_position_embeddings": length, "rope_parameters": rope, "initializer_range": 0.2}
    model = build("LlamaForCausalLM", **sizes, **more).double()
    tokens = torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        own = model(input_ids=torch.tensor([tokens])).logits[0]
    packed = PackedModel(model)
    ((uncut, _),) = packed([NextTokens(kv=packed.new_kv(), tokens=tokens, logits=length)])
    kv, found = packed.new_kv(), []
    for size in (1, 2, BLOCK - 5, 3, 200, length):
        chunk = tokens[kv.length :][:size]
        ((logits, _),) = packed([NextTokens(kv=kv, tokens=chunk, logits=len(chunk))])
        found.append(logits)
    packed.close()
    assert torch.equal(torch.cat(found), uncut)
    assert (uncut - own).abs().max() <= 1e7 * 2**-53 * own.abs().max()


#


SHAPE = Shape(windows=(None, None), heads=3, key_width=2, value_width=1, dtype=torch.float32)
STEPS = st.lists(
    st.tuples(st.sampled_from(["append", "truncate", "prefix"]), st.integers(0, 2 * BLOCK), st.integers(0, 3)),
    max_size=12,
)


def extend(kv: KeyValues, numbers: torch.Tensor) -> None:
    """Append tokens whose keys and values are these numbers, with a sign per layer."""
    tokens = len(numbers)
    kv.grow(tokens)
    for layer in range(SHAPE.layers):
        values = (numbers * (-1) ** layer).view(-1, 1, 1).expand(tokens, SHAPE.heads, 1)
        kv.write(layer, values.expand(-1, -1, SHAPE.key_width), values)


def numbers_in(kv: KeyValues) -> list[float]:
    found = [
        torch.cat(
            [torch.cat([keys.mT, values], -1) for keys, values in kv.blocks(layer).values()] or [torch.zeros(3, 0, 3)],
            1,
        )
        for layer in (0, 1)
    ]
    assert torch.equal(found[0], -found[1])
    return found[0][2, : kv.length, 1].tolist()


@given(STEPS)
@settings(max_examples=30)
def test_sequences_that_share_blocks_keep_their_own_tokens(steps: list[tuple[str, int, int]]) -> None:
    sequences, last = [KeyValues(SHAPE)], 0
    expected: list[list[float]] = [[]]
    for step, size, chosen in steps:
        index = chosen % len(sequences)
        kv, tokens = sequences[index], expected[index]
        if step == "append":
            new = torch.arange(last + 1, last + 1 + size, dtype=torch.float32)
            last += size
            extend(kv, new)
            expected[index] = tokens + new.tolist()
        elif step == "truncate":
            kv.truncate(size)
            expected[index] = tokens[:size]
        elif size <= len(tokens):
            sequences.append(kv.prefix(size))
            expected.append(tokens[:size])
        assert [numbers_in(kv) for kv in sequences] == expected
        assert all(held_bytes([kv]) == SHAPE.bytes(len(tokens)) for kv, tokens in zip(sequences, expected, strict=True))


def test_the_shape_follows_the_configuration() -> None:
    llama = LlamaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=5)
    gemma = GemmaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=1, head_dim=32, num_hidden_layers=5)
    gpt2 = GPT2Config(n_embd=96, n_head=6, n_layer=5)
    mistral = MistralConfig(num_hidden_layers=2, sliding_window=8)
    mixed = Qwen2Config(
        num_hidden_layers=2,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    )
    sizes = [Shape.from_config(config, torch.bfloat16) for config in (llama, gemma, gpt2, mistral, mixed)]
    assert [(shape.heads, shape.key_width) for shape in sizes[:3]] == [(2, 16), (1, 32), (6, 16)]
    assert [shape.windows for shape in sizes] == [*[(None,) * 5] * 3, (8, 8), (None, 8)]
    assert sizes[0].bytes(BLOCK + 1) == 2 * BLOCK * 5 * 2 * (16 + 16) * 2


@given(st.integers(1, 2 * BLOCK), st.lists(st.integers(1, BLOCK + 40), min_size=1, max_size=12))
@settings(max_examples=30)
def test_what_a_window_hides_is_released_and_what_a_later_token_sees_is_there(window: int, steps: list[int]) -> None:
    """Layer 1 has a window, layer 0 has none."""
    kv, numbers = KeyValues(replace(SHAPE, windows=(None, window))), list[float]()
    for tokens in steps:
        new = torch.arange(len(numbers), len(numbers) + tokens, dtype=torch.float32)
        extend(kv, new)
        numbers += new.tolist()
        assert held_bytes([kv]) <= kv.shape.bytes(len(numbers), step=max(steps))
        kv.release()
        seen = max(0, len(numbers) - window + 1)
        kept = kv.blocks(1)
        assert list(kept) == list(range(seen // BLOCK, -(-len(numbers) // BLOCK)))
        for place in range(seen, len(numbers)):
            assert kept[place // BLOCK][1][0, place % BLOCK, 0] == -numbers[place]
        assert len(kv.blocks(0)) == -(-len(numbers) // BLOCK)
        shortest = kv.shortest
        assert shortest <= len(numbers)
        shorter = kv.prefix(shortest)
        shorter.grow(1)
        first = max(0, shortest - window + 1) // BLOCK
        assert set(shorter.blocks(1)) >= set(range(first, shortest // BLOCK + 1))


# Local functions of rows give a row the same bits, whatever other rows are computed with it


_WEIGHT = torch.randn(48, 1536, generator=torch.Generator().manual_seed(0))
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, _weight(x)),
    "addmm": lambda x: torch.addmm(_weight(x)[:, 0], x.view(-1, x.shape[-1]), _weight(x).t()),
    "tanh": torch.tanh,
    "exp": Tensor.exp,
    **{name: ACT2FN[name] for name in ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu")},
}


def _weight(x: Tensor) -> Tensor:
    return _WEIGHT[:, : x.shape[-1]].to(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=8)
@example(rows=9, width=193, seed=0)  # a row ends within a vector
@given(
    rows=st.integers(0, 40),
    width=st.one_of(st.integers(1, 333), st.sampled_from([64, 320, 1536])),
    seed=st.integers(0, 9),
)
def test_a_row_has_the_same_bits_alone_and_among_others(
    name: str, dtype: torch.dtype, rows: int, width: int, seed: int
) -> None:
    x = torch.randn(rows, 1, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    compute = FUNCTIONS[name]

    with RowBlocks():
        together = compute(x)
        alone = torch.cat([compute(row) for row in x.split(1)])
    assert torch.equal(together, alone)
    torch.testing.assert_close(together, compute(x), rtol=0.05, atol=1e-3 if dtype == torch.float32 else 0.1)


class Plain(nn.Module):
    """Runs `count` of its parts, and returns for itself and each part whether a mode was active."""

    def __init__(self, *parts: nn.Module, count: int = 9) -> None:
        super().__init__()
        self.parts, self.count = nn.ModuleList(parts), count

    def forward(self, x: Tensor) -> list[bool]:
        found = [flag for part in [*self.parts][: self.count] for flag in part(x)]
        return [torch._C._len_torch_function_stack() > 0, *found]


class Calling(Plain):
    def forward(self, x: Tensor) -> list[bool]:
        x.tanh()
        return super().forward(x)


class Late(Plain):
    """Runs for the first time after the first pass."""

    def forward(self, x: Tensor) -> list[bool]:
        assert x.isfinite().all()
        return super().forward(x)


def test_after_the_first_pass_without_adapters_the_mode_is_active_in_modules_that_need_it_only() -> None:
    model = Plain(Calling(), Calling(Plain(Calling()), Calling()), Plain(), Late(), count=3)
    blocks = ModuleBlocks(model)

    def active(*, adapted: bool = False, of: nn.Module = model, x: float = 1.0) -> list[bool]:
        with blocks.step(adapted=adapted):
            found: list[bool] = of(torch.full((3, 5), x, dtype=torch.float32, device="cpu"))
            return found

    assert active(adapted=True) == active() == [True] * 7
    model.count = 4
    expected = [False, True, True, False, True, True, False, True]
    assert active() == active(adapted=True) == active(of=copy.deepcopy(model)) == expected
    with pytest.raises(AssertionError):
        active(x=torch.nan)
    assert not any(model(torch.ones(3, 5)))  # outside of a step, also after an error in a module with the mode
    assert active() == expected
    blocks.close()
    assert not any(active())


@pytest.mark.parametrize("name", ["GPTNeoXForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM"])
def test_a_token_has_the_same_bits_alone_and_among_others(name: str) -> None:
    packed = PackedModel(build(name).eval())
    tokens = torch.randint(3, 60, (11,), generator=torch.Generator().manual_seed(0)).tolist()
    for _ in range(2):
        alone = [packed([NextTokens(kv=packed.new_kv(), tokens=[token])])[0] for token in tokens]
        together = packed([NextTokens(kv=packed.new_kv(), tokens=[token]) for token in tokens])
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one.logits, other.logits)
    packed.close()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=10)
@given(rows=st.integers(1, 11), outputs=st.integers(1, 21), width=st.integers(1, 130), seed=st.integers(0, 9))
def test_the_compiled_linear_has_the_same_bits_with_every_instruction_set(
    dtype: torch.dtype, rows: int, outputs: int, width: int, seed: int
) -> None:
    """And an error of at most one rounding per term, of 2^-24 of the sum of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(count, width, generator=generator).to(dtype) for count in (rows, outputs))
    results = []
    for isa in native.isas():
        with switched(SYMBIOSIS_PRIV_ISA=isa.name.lower()):
            results.append(linear(x, weight))
    assert all(torch.equal(result, results[0]) for result in results)
    exact, sizes = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    rounding = 2**-24 * (width + 1) + (2**-8 if dtype == torch.bfloat16 else 0)
    assert ((results[0] - exact).abs() <= rounding * sizes).all()
