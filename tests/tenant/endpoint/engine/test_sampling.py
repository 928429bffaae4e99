"""How tokens are chosen."""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from symbiosis_priv.errors import NonFiniteError
from tenant.endpoint.api.vocabulary import Vocabulary
from tenant.endpoint.engine.answer import Sampler, TextStream, token_logprob
from tenant.endpoint.engine.requests import Sampling
from tests.tenant.endpoint.engine.conftest import OnlyThese

numbers = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40)


def vector(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@given(numbers, st.integers(1, 5), st.floats(0.1, 1), st.floats(0, 1), st.integers(0, 2**63 - 1))
def test_a_sampled_token_is_among_those_that_transformers_keeps_and_the_seed_repeats_it(
    values: list[float], top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    scores = vector(values).double()[None] / 0.7
    for keep in (TopKLogitsWarper(top_k), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)):
        scores = keep(None, scores)  # type: ignore[arg-type]
    least = scores[scores.isfinite()].min() * 0.7
    said = Sampling(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    first, second = Sampler(said), Sampler(said)
    drawn = [first(vector(values))[0] for _ in range(5)]
    assert drawn == [second(vector(values))[0] for _ in range(5)]
    assert min(values[token] for token in drawn) >= least - 1e-6  # closer ones have one probability


def test_frequencies_are_the_probabilities() -> None:
    logits = vector([0.0, math.log(2), math.log(5), -50.0])
    sampler = Sampler(Sampling(temperature=1.0, seed=0))
    counts = torch.bincount(torch.tensor([sampler(logits)[0] for _ in range(4000)]), minlength=4).tolist()
    assert counts[3] == 0
    for count, chance in zip(counts, (1 / 8, 2 / 8, 5 / 8), strict=False):
        assert abs(count / 4000 - chance) < 0.035  # 4.5 standard deviations at most


def test_top_p_keeps_the_smallest_set() -> None:
    logits = vector([math.log(x) for x in (0.5, 0.3, 0.15, 0.05)])
    for top_p, expected in ((0.0, {0}), (0.5, {0}), (0.6, {0, 1}), (0.81, {0, 1, 2})):
        sampler = Sampler(Sampling(temperature=1.0, top_p=top_p, seed=1))
        assert {sampler(logits)[0] for _ in range(100)} == expected
    flat = torch.zeros(5000)  # more than the first guess of `_most_likely`
    sampler = Sampler(Sampling(temperature=1.0, top_p=0.9, seed=1))
    assert len({sampler(flat)[0] for _ in range(2000)}) > 1100


def test_penalties_biases_and_raw_log_probabilities() -> None:
    logits = vector([3.0, 2.0, 1.5, 0.0])
    sampler = Sampler(Sampling(presence_penalty=0.75, frequency_penalty=0.5, logprobs=1))
    tokens = [sampler(logits) for _ in range(4)]
    assert [token for token, _ in tokens] == [0, 1, 0, 2]  # 3 1.75 1.25 | 0.75 | ...
    assert tokens[1][1] == token_logprob(logits, 1, top=1)
    assert tokens[1][1].top[0][0] == 0
    assert Sampler(Sampling(logit_bias={3: 100.0, 0: -100.0}))(logits)[0] == 3


@given(numbers, st.lists(st.integers(0, 1), max_size=3), st.floats(0.5, 3))
def test_repetitions_are_penalised_as_in_transformers(values: list[float], prompt: list[int], penalty: float) -> None:
    sampler = Sampler(Sampling(repetition_penalty=penalty), prompt=prompt)
    tokens, process = list(prompt), RepetitionPenaltyLogitsProcessor(penalty)
    for _ in range(4):
        scores = process(torch.tensor([tokens], dtype=torch.long), vector(values)[None])[0]
        tokens.append(sampler(vector(values))[0])
        assert tokens[-1] == int(scores.argmax())


@given(numbers, st.integers(0, 4), st.sampled_from([0.0, 1.0]))
def test_no_end_comes_before_min_tokens(values: list[float], min_tokens: int, temperature: float) -> None:
    end = int(vector(values).argmax())
    sampler = Sampler(Sampling(temperature=temperature, min_tokens=min_tokens, seed=1), ends={end})
    tokens = [sampler(vector(values))[0] for _ in range(min_tokens + 1)]
    assert end not in tokens[:min_tokens]
    assert temperature or tokens[-1] == end


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_a_grammar_masks_tokens_and_ends_the_answer(temperature: float) -> None:
    sampler = Sampler(Sampling(temperature=temperature, grammar=lambda: OnlyThese(1, 3)))
    logits = torch.arange(20.0)  # tokens from 8 on have no bit
    for _ in range(2):
        assert sampler.finished is False
        assert sampler(logits)[0] in (1, 3)
    assert sampler.finished


def test_no_token_with_a_probability_is_an_error() -> None:
    with pytest.raises(NonFiniteError):
        Sampler(Sampling(temperature=1.0))(torch.full((4,), torch.nan))


@given(numbers, st.integers(0, 3))
def test_log_probabilities_are_those_of_softmax(values: list[float], top: int) -> None:
    logits: Any = vector(values)
    found = token_logprob(logits, 1, top=top)
    expected = (logits.double() - logits.double().logsumexp(0)).tolist()
    assert found.logprob == pytest.approx(expected[1])
    assert [value for _, value in found.top] == pytest.approx(sorted(expected, reverse=True)[:top])


def pieces(stream: TextStream, tokens: list[int]) -> list[str]:
    found = []
    for token in tokens:
        if stream.stopped is None:
            found.append(stream.add(token))
    return [*found, stream.end()]


# Hypothesis draws constants of the code too, and a special token such as `<|end|>` is no text
TEXTS = st.text().filter(lambda text: "<|" not in text)


@given(TEXTS, TEXTS)
def test_pieces_are_the_text_without_half_characters(tokenizer: Any, prompt: str, text: str) -> None:
    before, tokens = (tokenizer.encode(one, add_special_tokens=False) for one in (prompt, text))
    found = pieces(TextStream(tokenizer, prompt=before), tokens)
    assert "".join(found) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in found)


@given(st.lists(st.integers(0, 319), max_size=15))
def test_tokens_that_are_no_text_have_the_text_of_the_tokenizer(tokenizer: Any, tokens: list[int]) -> None:
    whole = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(pieces(TextStream(tokenizer), tokens)) == whole


def test_a_character_that_the_prompt_began_is_completed(tokenizer: Any) -> None:
    tokens = tokenizer.encode("\x80", add_special_tokens=False)
    assert len(tokens) == 2
    assert pieces(TextStream(tokenizer, prompt=tokens[:1]), tokens[1:]) == ["\x80", ""]


words = st.text("ab é", max_size=12)


@given(words, st.lists(words, max_size=3))
def test_a_stop_text_ends_the_answer_wherever_tokens_end(tokenizer: Any, text: str, stop: list[str]) -> None:
    stream = TextStream(tokenizer, stop=stop)
    found = "".join(pieces(stream, tokenizer.encode(text, add_special_tokens=False)))
    places = [text.find(one) for one in stop if one and one in text]
    assert (stream.stopped is not None) == bool(places)
    if not places:
        assert found == text
    else:
        # the stop text that was complete first has ended the answer
        assert any(found + one == text[: len(found) + len(one)] for one in stop if one)
        assert not any(one in found for one in stop if one)


def test_the_beginning_of_a_stop_text_is_held_back(tokenizer: Any) -> None:
    found = pieces(TextStream(tokenizer, stop=["END OF IT"]), tokenizer.encode("x END OF", add_special_tokens=False))
    assert ("".join(found[:-1]), found[-1]) == ("x ", "END OF")


@given(st.lists(words | st.sampled_from(["<|end|>", "<|pad|>"]), max_size=8), st.data())
def test_a_stop_text_may_have_special_tokens(tokenizer: Any, parts: list[str], data: st.DataObject) -> None:
    """They are no part of the answer, and end it all the same."""
    written, shown = "".join(parts), "".join(re.sub(r"<.*>", lambda one: "-" * len(one[0]), part) for part in parts)
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(written))] * 2)))
    stop = written[begin:end] or "never"
    stream = TextStream(tokenizer, stop=[stop])
    found = "".join(pieces(stream, tokenizer.encode(written, add_special_tokens=False)))
    assert stream.stopped == (stop if stop in written else None)
    assert found == shown[: len(written.partition(stop)[0])].replace("-", "")


@given(TEXTS, TEXTS)
def test_the_place_of_a_token_is_that_of_its_first_byte(tokenizer: Any, prompt: str, text: str) -> None:
    before, tokens = (tokenizer.encode(one, add_special_tokens=False) for one in (prompt, text))
    stream, written = TextStream(tokenizer, prompt=before), b""
    vocabulary = Vocabulary(tokenizer, size=320, ends=())
    for token in tokens:
        assert stream.place == len(written.decode(errors="ignore"))
        stream.add(token)
        written += vocabulary.bytes_of(token) or b""
