"""Bodies with millions of wrong values: their errors take no more memory than the bodies."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tenant.endpoint.api.bodies import ChatRequest, CompletionRequest, EmbeddingRequest, ResponsesRequest

MANY = 20_000
FIELDS = {f"field-{number}": 0 for number in range(MANY)}
WRONG: list[list[Any]] = [[0] * MANY, [{}] * MANY, [[0]] * MANY, ["x"] * MANY]
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
RESPONSE: dict[str, Any] = {"model": "tiny", "input": "x"}
PLACES = [
    (CompletionRequest, {"model": "tiny"}, ("prompt",)),
    (CompletionRequest, {"model": "tiny", "prompt": "x"}, ("stop",)),
    (CompletionRequest, {"model": "tiny", "prompt": "x"}, ("logit_bias",)),
    (EmbeddingRequest, {"model": "tiny"}, ("input",)),
    (ChatRequest, {"model": "tiny"}, ("messages",)),
    (ChatRequest, CHAT, ("messages", 0, "content")),
    (ChatRequest, CHAT, ("messages", 0, "tool_calls")),
    (ChatRequest, CHAT, ("tools",)),
    (ChatRequest, CHAT, ("modalities",)),
    (ChatRequest, CHAT, ("metadata",)),
    (ChatRequest, CHAT, ("response_format",)),
    (ResponsesRequest, {"model": "tiny"}, ("input",)),
    (ResponsesRequest, {"model": "tiny", "input": [{"role": "user", "content": "x"}]}, ("input", 0, "content")),
    (ResponsesRequest, RESPONSE, ("include",)),
    (ResponsesRequest, RESPONSE, ("metadata",)),
    (ResponsesRequest, RESPONSE, ("tools",)),
]


def with_value(body: Any, place: tuple[str | int, ...], value: Any) -> Any:
    """Return a copy of a body with another value in one place."""
    if not place:
        return value
    if isinstance(body, list):
        return [with_value(one, place[1:], value) for one in body]
    return body | {place[0]: with_value(body.get(place[0]), place[1:], value)}


def errors(body: type[BaseModel], given: Any) -> int:
    try:
        body.model_validate(given)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize(("body", "given", "place"), PLACES)
def test_the_errors_of_a_body_are_few(
    body: type[BaseModel], given: dict[str, Any], place: tuple[str | int, ...]
) -> None:
    """pydantic describes each error in a kilobyte: a body of 8 MiB took gigabytes."""
    assert errors(body, given | FIELDS) == 1
    for value in (*WRONG, FIELDS):
        assert errors(body, with_value(given, place, value)) < 32


def test_many_token_ids_are_checked_at_once() -> None:
    """One by one, a body of 8 MiB of them would take the event loop of all clients for a second."""
    ids = [5] * 100_000
    assert CompletionRequest.model_validate({"model": "tiny", "prompt": ids}).prompt is ids
    assert CompletionRequest.model_validate({"model": "tiny", "prompt": [5.0, 7]}).prompt == [5, 7]
    for wrong in (5.0, True, -1):
        with pytest.raises(ValidationError):
            CompletionRequest.model_validate({"model": "tiny", "prompt": [*ids, wrong]})


def test_all_messages_together_have_a_limited_number_of_parts() -> None:
    """Each takes ten microseconds of the event loop, and a body of 8 MiB has room for 300,000."""
    part, other = {"type": "text", "text": ""}, {"type": "input_text", "text": ""}
    for body, name, one in ((ChatRequest, "messages", part), (ResponsesRequest, "input", other)):
        for count, wrong in ((1024, 0), (1025, 1)):
            message = {"role": "user", "content": [one] * count}
            assert errors(body, {"model": "tiny", name: [message] * 16}) == wrong
    call = {"id": "a", "type": "function", "function": {"name": "b", "arguments": ""}}
    assert errors(ChatRequest, {"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [call] * 128}] * 129})
