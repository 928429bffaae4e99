"""Guesses change the number of steps, and no token; executors see the same rows for each step of an answer."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from symbiosis_priv.errors import ConfigError
from tenant import RemoteConfig
from tenant.endpoint.engine.continuous import ContinuousEngine, Limits
from tenant.endpoint.engine.packed import Output, PackedModel
from tenant.endpoint.engine.requests import Done, Event, Failed, Request, Sampling, Token
from tenant.endpoint.engine.sequence import Drafter
from tenant.endpoint.engine.speculation import DraftModel, PromptLookup, _continued
from tenant.model.loading import load_language_model

AHEAD = 4
PROMPTS = [tuple(range(5, 25)), (7,), (9, 8, 7, 9, 8, 7, 9, 8)]
HOT = Sampling(temperature=0.1, top_p=0.9, seed=5, presence_penalty=0.1, logprobs=2)


class Recorded(PackedModel):
    """Keeps the numbers of rows of each step, per sequence."""

    steps: list[list[int]]

    def __call__(self, rows: Any) -> list[Output]:
        self.steps.append([len(part.tokens) for part in rows])
        return super().__call__(rows)


@pytest.fixture(scope="module")
def packed(checkpoint: Path) -> Iterator[Recorded]:
    packed = Recorded(load_language_model(checkpoint, remote=RemoteConfig(masking="simulate")))
    yield packed
    packed.close()


@pytest.fixture(scope="module")
def draft(checkpoint: Path) -> Iterator[PackedModel]:
    packed = PackedModel(load_language_model(checkpoint))
    yield packed
    packed.close()


def answers(packed: Recorded, tokenizer: Any, drafter: Drafter | None, **said: Any) -> list[list[Event]]:
    """Generate for all prompts together, and return the tokens of each. The steps are in `packed.steps`."""
    packed.steps = []
    with running(packed, tokenizer, drafter) as engine:
        found: list[list[Event]] = [[] for _ in PROMPTS]
        ended = [threading.Event() for _ in PROMPTS]

        def sink(index: int, event: Event) -> None:
            assert not isinstance(event, Failed), event
            found[index].append(event)
            if isinstance(event, Done):
                ended[index].set()

        for i, prompt in enumerate(PROMPTS):
            engine.submit(Request(id=str(i), prompt=prompt, **said), lambda event, i=i: sink(i, event))  # type: ignore[misc]
        assert all(event.wait(60) for event in ended)
    return [[event for event in events if isinstance(event, Token)] for events in found]


@contextmanager
def running(packed: PackedModel, tokenizer: Any, drafter: Drafter | None, **limits: int) -> Iterator[ContinuousEngine]:
    closed, packed.close = packed.close, lambda: None  # type: ignore[method-assign]
    engine = ContinuousEngine(packed, tokenizer, drafter=drafter, limits=Limits(**limits))
    try:
        yield engine
    finally:
        engine.close()
        packed.close = closed  # type: ignore[method-assign]


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "hot"])
def test_guesses_change_no_token(packed: Recorded, draft: PackedModel, tokenizer: Any, sampling: Sampling) -> None:
    said = {"max_tokens": 26, "sampling": sampling}
    expected, plain = answers(packed, tokenizer, None, **said), len(packed.steps)
    for drafter in (PromptLookup(ahead=AHEAD), DraftModel(draft, ahead=AHEAD)):
        assert answers(packed, tokenizer, drafter, **said) == expected
        assert len(packed.steps) < plain
        assert {size for step in packed.steps[1:] for size in step} == {1 + AHEAD}
    if sampling == Sampling():  # the model guesses for itself, and is split: its weights are rounded
        assert 2 * len(packed.steps) <= plain


class Wrong(Drafter):
    """Guesses that are never right."""

    ahead = AHEAD

    def draft(self, sequences: Any) -> Any:
        return {s: [(s.tokens[-1] + 1 + i) % 300 for i in range(AHEAD)] for s in sequences if s.decoding}


def test_wrong_guesses_cost_rows_and_nothing_else(packed: Recorded, tokenizer: Any) -> None:
    expected, steps = answers(packed, tokenizer, None, max_tokens=12), len(packed.steps)
    assert answers(packed, tokenizer, Wrong(), max_tokens=12) == expected
    assert len(packed.steps) <= steps


def test_a_guess_may_reach_behind_the_context(tokenizer: Any) -> None:
    """Learned positions end with the context, so a row behind it has none."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_positions=24, n_embd=16, n_layer=1, n_head=2)).eval()
    packed = Recorded(model)
    expected = answers(packed, tokenizer, None, max_tokens=4)
    assert answers(packed, tokenizer, PromptLookup(ahead=AHEAD), max_tokens=4) == expected


def test_the_memory_of_the_draft_model_is_admitted_too(packed: Recorded, draft: PackedModel, tokenizer: Any) -> None:
    memory = packed.shape.bytes(20)
    with running(packed, tokenizer, PromptLookup(), memory=memory) as engine:
        engine.submit(Request(id="1", prompt=(1,), max_tokens=1), lambda event: None)
    with (
        running(packed, tokenizer, DraftModel(draft), memory=memory) as engine,
        pytest.raises(ConfigError, match="bytes"),
    ):
        engine.submit(Request(id="1", prompt=(1,), max_tokens=1), lambda event: None)


def test_a_draft_model_with_another_vocabulary_is_refused(packed: Recorded, tokenizer: Any) -> None:
    small = LlamaConfig(
        vocab_size=packed.vocabulary + 1, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    other = PackedModel(LlamaForCausalLM(small).eval())
    with pytest.raises(ConfigError, match="tokenizer"), running(packed, tokenizer, DraftModel(other)):
        pass


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 6))
def test_prompt_lookup_is_a_search_from_the_end(tokens: list[int], ahead: int) -> None:
    def search() -> list[int]:
        for count in (3, 2, 1):
            for start in range(len(tokens) - count - 1, -1, -1):
                if tokens[start : start + count] == tokens[len(tokens) - count :]:
                    return tokens[start + count :]
        return tokens[-1:]

    expected = (search() * ahead)[:ahead]
    assert _continued(np.array(tokens, np.int64), ahead) == expected
