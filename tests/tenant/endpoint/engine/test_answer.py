"""The text of an answer, piece by piece."""

from typing import Any

from hypothesis import given, strategies as st

from tenant.endpoint.engine.answer import TextStream


def pieces(stream: TextStream, tokens: list[int]) -> list[str]:
    found = []
    for token in tokens:
        if not stream.stopped:
            found.append(stream.add(token))
    return [*found, stream.end()]


@given(st.text(), st.text())
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
    assert stream.stopped == bool(places)
    if not places:
        assert found == text
    else:
        # the stop text that was complete first has ended the answer
        assert any(found + one == text[: len(found) + len(one)] for one in stop if one)
        assert not any(one in found for one in stop if one)


def test_the_beginning_of_a_stop_text_is_held_back(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, stop=["END OF IT"])
    tokens = [token for char in "x END OF" for token in tokenizer.encode(char, add_special_tokens=False)]
    assert "".join(stream.add(token) for token in tokens) == "x "
    assert stream.end() == "END OF"
