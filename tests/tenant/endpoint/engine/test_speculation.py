"""Guesses change the number of steps, and no token; executors see the same rows for each step of an answer."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.harness.base_model import Pretraining, make_base_model
from tenant import RemoteConfig
from tenant.endpoint.api.vocabulary import Vocabulary
from tenant.endpoint.engine.continuous import ContinuousEngine, EngineLimits
from tenant.endpoint.engine.kv import KeyValues
from tenant.endpoint.engine.packed_model import Output, PackedModel
from tenant.endpoint.engine.requests import Sampling, Token
from tenant.endpoint.engine.sequence import Drafter
from tenant.endpoint.engine.speculation import DraftModel, PromptLookup, _continued, open_drafter
from tenant.model.loading import load_language_model
from tests.compatibility.families import build
from tests.tenant.endpoint.engine.conftest import Asked

AHEAD = 4
PROMPTS = [tuple(range(5, 25)), (7,), (9, 8, 7, 9, 8, 7, 9, 8)]
HOT = Sampling(temperature=0.1, top_p=0.9, seed=5, presence_penalty=0.1, logprobs=2)


class Recorded(PackedModel):
    """Keeps the numbers of rows of each step, per sequence, and the guessed tokens."""

    steps: list[dict[KeyValues, int]]

    def __call__(self, rows: Any) -> list[Output]:
        self.steps.append({part.kv: len(part.tokens) for part in rows})
        return super().__call__(rows)

    def of_sequences(self) -> list[list[int]]:
        """The numbers of rows of each sequence, step by step; the first one is its prompt."""
        found: dict[KeyValues, list[int]] = {}
        for step in self.steps:
            for kv, rows in step.items():
                found.setdefault(kv, []).append(rows)
        return list(found.values())


@pytest.fixture(scope="module")
def packed(checkpoint: Path) -> Iterator[Recorded]:
    packed = Recorded(load_language_model(checkpoint, remote=RemoteConfig(masking="simulate")))
    yield packed
    packed.close()


@pytest.fixture(scope="module")
def draft(checkpoint: Path, tokenizer: Any) -> Drafter:
    return open_drafter(str(checkpoint), tokenizer, ahead=AHEAD)


def answers(packed: Recorded, tokenizer: Any, drafter: Drafter | None, **said: Any) -> list[list[Token]]:
    """Generate for all prompts together, and return the tokens of each. The steps are in `packed.steps`."""
    packed.steps = []
    with running(packed, tokenizer, drafter) as engine:
        asked = [Asked(engine, prompt, **said) for prompt in PROMPTS]
        for one in asked:
            one.done()
    return [one.got for one in asked]


@contextmanager
def running(packed: PackedModel, tokenizer: Any, drafter: Drafter | None, **limits: int) -> Iterator[ContinuousEngine]:
    closed, packed.close = packed.close, lambda: None  # type: ignore[method-assign]
    engine = ContinuousEngine(packed, tokenizer, drafter=drafter, limits=EngineLimits(**limits))
    try:
        yield engine
    finally:
        engine.close()
        packed.close = closed  # type: ignore[method-assign]


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "hot"])
def test_guesses_change_no_token(packed: Recorded, draft: Drafter, tokenizer: Any, sampling: Sampling) -> None:
    said = {"max_tokens": 26, "sampling": sampling}
    expected, plain = answers(packed, tokenizer, None, **said), len(packed.steps)
    for drafter in (PromptLookup(ahead=AHEAD), draft):
        assert answers(packed, tokenizer, drafter, **said) == expected
        assert len(packed.steps) < plain
        assert all(set(rows[1:]) == {1 + AHEAD} for rows in packed.of_sequences())
    if sampling == Sampling():  # the model guesses for itself, and is split: its weights are rounded
        assert 2 * len(packed.steps) <= plain


def test_a_guess_is_accepted_only_where_the_grammar_allows_it(packed: Recorded, tokenizer: Any) -> None:
    """The grammar asks for a number of repetitions, so lookup guesses right, and guesses one repetition too many."""
    ends = {tokenizer.eos_token_id}
    vocabulary = Vocabulary(tokenizer, size=packed.vocabulary, ends=ends)
    grammar = asyncio.run(vocabulary.grammar('start: "x,x,x,x,x,x,x,x,x,x;"', client=""))
    said = {"max_tokens": 40, "sampling": Sampling(grammar=grammar, logprobs=1)}
    expected, plain = answers(packed, tokenizer, None, **said), packed.of_sequences()
    texts = {tokenizer.decode([token.id for token in tokens]) for tokens in expected}
    assert texts == {"x,x,x,x,x,x,x,x,x,x;"}
    for drafter in (PromptLookup(ahead=AHEAD), Wrong()):
        assert answers(packed, tokenizer, drafter, **said) == expected
        guessed = packed.of_sequences()
        assert all(set(rows[1:]) == {1 + AHEAD} for rows in guessed)
        fewer = [len(rows) < len(alone) for rows, alone in zip(guessed, plain, strict=True)]
        assert fewer == [isinstance(drafter, PromptLookup)] * len(PROMPTS)


class Wrong(Drafter):
    """Guesses that are never right."""

    ahead = AHEAD

    def draft(self, sequences: Any) -> Any:
        return {s: [(s.tokens[-1] + 1 + i) % 300 for i in range(AHEAD)] for s in sequences if s.decoding}


def test_a_guess_may_reach_behind_the_context(tokenizer: Any) -> None:
    """Learned positions end with the context, so a row behind it has none. A draft model has no guess there, and the
    step has as many rows all the same."""
    packed = Recorded(model := build("GPT2LMHeadModel", vocab_size=320, n_positions=24))
    expected = answers(packed, tokenizer, None, max_tokens=4)
    for drafter in (PromptLookup(ahead=AHEAD), DraftModel(PackedModel(model), vocabulary=320, ahead=AHEAD)):
        assert answers(packed, tokenizer, drafter, max_tokens=4) == expected
        assert all(set(rows[1:]) <= {1 + AHEAD} for rows in packed.of_sequences())


def test_a_draft_model_needs_the_same_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    recipe = Pretraining(steps=1, batch=1, window=8, sentences=100, vocab=300, width=32, blocks=1)
    with pytest.raises(ConfigError, match="tokenizer"):
        open_drafter(str(make_base_model(tmp_path / "other", recipe=recipe)), tokenizer, ahead=1)


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
