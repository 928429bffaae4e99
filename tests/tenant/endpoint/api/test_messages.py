"""`/v1/messages` with Anthropic's client, unchanged."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from openai import OpenAI

from tests.cases import cases
from tests.tenant.endpoint.api.conftest import KEY, Served
from tests.tenant.endpoint.api.test_guard import ask

HELLO: Any = [{"role": "user", "content": "Hello there"}]
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=served.url, api_key=KEY, max_retries=0) as client:
        yield client


def test_a_message_is_the_chats_answer(claude: Any, client: OpenAI) -> None:
    asked: Any = {"model": "lora", "messages": HELLO, "max_tokens": 10, "extra_body": {"temperature": 0}}
    chat = client.chat.completions.create(**asked)  # both clients send fields that they do not know
    message = claude.messages.create(**asked)
    (block,) = message.content
    assert (block.type, block.text) == ("text", chat.choices[0].message.content)
    assert chat.usage is not None
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert message.usage.output_tokens == chat.usage.completion_tokens == 10
    assert message.stop_reason == "max_tokens"
    counted = claude.messages.count_tokens(model="lora", messages=HELLO)
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_a_stream_puts_together_to_the_message(claude: Any) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 12,
        "extra_body": {"temperature": 0},
        "system": "Be brief",
    }
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 1
    assert "".join(texts) == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_the_stop_text_is_named(claude: Any) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "extra_body": {"temperature": 0}}
    text = claude.messages.create(**asked).content[0].text
    stop = text[2:4]
    message = claude.messages.create(**asked, stop_sequences=["never", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in message.content) == text[: text.index(stop)]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tools_are_called_and_answered(claude: Any, choice: Any) -> None:
    asked: Any = {"model": "lora", "max_tokens": 160, "tools": [WEATHER], "tool_choice": choice}
    message = claude.messages.create(**asked, messages=HELLO)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert (message.stop_reason, call.name) == ("tool_use", "weather")
    assert call.input["city"] in ("Rome", "Oslo")
    with claude.messages.stream(**asked, messages=HELLO) as stream:
        assert [block.type for block in stream.get_final_message().content][-1] == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    said = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    counted = claude.messages.count_tokens(model="lora", messages=said, tools=[WEATHER])
    assert counted.input_tokens > claude.messages.count_tokens(model="lora", messages=HELLO).input_tokens
    assert claude.messages.create(model="lora", max_tokens=2, messages=said).usage.output_tokens > 0


@cases(__file__, "refused")
def test_what_is_not_supported_is_refused_by_name(claude: Any, send: dict[str, Any], says: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=says) as error:
        claude.messages.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 2, **send})
    assert error.value.body["type"] == "error"  # type: ignore[index]


def test_the_key_is_needed_in_either_header(served: Served) -> None:
    """The other header is tried in test_guard.py."""
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 1}
    for headers, expected in (({"x_api_key": KEY}, 200), ({"x_api_key": "no"}, 401), ({}, 401)):
        status, _ = ask(served, "POST", "/v1/messages", body, Authorization=None, **headers)
        assert status == expected
