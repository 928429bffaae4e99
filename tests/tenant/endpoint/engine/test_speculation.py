"""Guesses change the number of steps, and no token; executors see the same rows for each step of an answer."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tenant import RemoteConfig
from tenant.endpoint.api.vocabulary import Vocabulary
from tenant.endpoint.engine import continuous
from tenant.endpoint.engine.continuous import ContinuousEngine
from tenant.endpoint.engine.kv import KeyValues
from tenant.endpoint.engine.packed_model import Output, PackedModel
from tenant.endpoint.engine.requests import AHEAD, Sampling, Token
from tenant.endpoint.engine.speculation import guess
from tenant.model.loading import load_language_model
from tests.compatibility.families import build
from tests.tenant.endpoint.engine.conftest import Asked

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
    closed, packed.close = packed.close, lambda: None  # type: ignore[method-assign]  # by the first engine
    yield packed
    closed()


def answers(packed: Recorded, tokenizer: Any, ahead: int, **said: Any) -> list[list[Token]]:
    """Generate for all prompts together, and return the tokens of each. The steps are in `packed.steps`."""
    packed.steps = []
    engine = ContinuousEngine(packed, tokenizer, ahead=ahead)
    asked = [Asked(engine, prompt, **said) for prompt in PROMPTS]
    for one in asked:
        one.done()
    engine.close()
    return [one.got for one in asked]


def right(expected: list[list[Token]]) -> Callable[[Sequence[int], int], list[int]]:
    """Guesses that are always right."""

    def find(text: Sequence[int], ahead: int) -> list[int]:
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            whole = [*prompt, *(token.id for token in answer)]
            if whole[: len(text)] == list(text):
                return (whole[len(text) :] + [0] * ahead)[:ahead]
        raise AssertionError

    return find


def wrong(text: Sequence[int], ahead: int) -> list[int]:
    """Guesses that are never right."""
    return [(text[-1] + 1 + i) % 300 for i in range(ahead)]


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "hot"])
def test_guesses_change_no_token(
    packed: Recorded, tokenizer: Any, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"max_tokens": 26, "sampling": sampling}
    expected, plain = answers(packed, tokenizer, 0, **said), len(packed.steps)
    for guesses in (guess, right(expected)):
        monkeypatch.setattr(continuous, "guess", guesses)
        assert answers(packed, tokenizer, AHEAD, **said) == expected
        assert len(packed.steps) < plain
        assert all(set(rows[1:]) == {1 + AHEAD} for rows in packed.of_sequences())
    assert 3 * len(packed.steps) <= plain  # with right guesses, a step has five tokens


def test_a_guess_is_accepted_only_where_the_grammar_allows_it(
    packed: Recorded, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar asks for a number of repetitions, so lookup guesses right, and guesses one repetition too many."""
    vocabulary = Vocabulary(tokenizer, size=packed.vocabulary, ends={tokenizer.eos_token_id})
    grammar = asyncio.run(vocabulary.grammar('start: "x,x,x,x,x,x,x,x,x,x;"', client=""))
    said = {"max_tokens": 40, "sampling": Sampling(grammar=grammar, logprobs=1)}
    expected, plain = answers(packed, tokenizer, 0, **said), packed.of_sequences()
    texts = {tokenizer.decode([token.id for token in tokens]) for tokens in expected}
    assert texts == {"x,x,x,x,x,x,x,x,x,x;"}
    for guesses in (guess, wrong):
        monkeypatch.setattr(continuous, "guess", guesses)
        assert answers(packed, tokenizer, AHEAD, **said) == expected
        guessed = packed.of_sequences()
        assert all(set(rows[1:]) == {1 + AHEAD} for rows in guessed)
        fewer = [len(rows) < len(alone) for rows, alone in zip(guessed, plain, strict=True)]
        assert fewer == [guesses is guess] * len(PROMPTS)


def test_a_guess_may_reach_behind_the_context(tokenizer: Any) -> None:
    """Learned positions end with the context, so a row behind it has none. The step has as many rows all the same."""
    packed = Recorded(build("GPT2LMHeadModel", vocab_size=320, n_positions=24))
    expected = answers(packed, tokenizer, 0, max_tokens=4)
    packed = Recorded(packed.model)
    assert answers(packed, tokenizer, AHEAD, max_tokens=4) == expected
    assert all(set(rows[1:]) <= {1 + AHEAD} for rows in packed.of_sequences())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 6))
def test_a_guess_is_a_search_from_the_end(tokens: list[int], ahead: int) -> None:
    def search() -> list[int]:
        for count in (3, 2, 1):
            for start in range(len(tokens) - count - 1, -1, -1):
                if tokens[start : start + count] == tokens[len(tokens) - count :]:
                    return tokens[start + count :]
        return tokens[-1:]

    assert guess(tokens, ahead) == (search() * ahead)[:ahead]
