from dataclasses import replace

import torch
from hypothesis import given, settings, strategies as st
from transformers import GemmaConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

from tenant.endpoint.engine.kv import BLOCK, KeyValues, Shape, held_bytes

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


def test_a_shared_beginning_is_counted_once_and_freed_with_its_last_sequence() -> None:
    kv = KeyValues(SHAPE)
    extend(kv, torch.arange(3 * BLOCK, dtype=torch.float32))
    other = kv.prefix(2 * BLOCK + 1)
    assert held_bytes([kv, other]) == SHAPE.bytes(4 * BLOCK)
    assert kv.blocks(1)[1][0].data_ptr() == other.blocks(1)[1][0].data_ptr()
    kv.truncate(0)
    assert held_bytes([kv, other]) == SHAPE.bytes(3 * BLOCK)


def test_truncate_ends_a_step_that_stopped_between_layers() -> None:
    kv = KeyValues(SHAPE)
    extend(kv, torch.arange(BLOCK, dtype=torch.float32))
    kv.grow(1)
    kv.write(0, torch.ones(1, 3, 2), torch.ones(1, 3, 1))
    assert (kv.length, len(kv.blocks(0))) == (BLOCK + 1, 2)
    kv.truncate(BLOCK)
    assert (kv.length, len(kv.blocks(0))) == (BLOCK, 1)


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
