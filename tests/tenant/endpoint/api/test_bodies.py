"""Bodies with millions of wrong values: their errors take no more memory than the bodies."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tenant.endpoint.api import bodies
from tenant.endpoint.api.bodies import ChatRequest, CompletionRequest, ResponsesRequest
from tests.cases import cases

MANY = 20_000
FIELDS = {f"field-{number}": 0 for number in range(MANY)}
WRONG: list[list[Any]] = [[0] * MANY, [{}] * MANY, [[0]] * MANY, ["x"] * MANY]


def with_value(body: Any, place: list[str | int], value: Any) -> Any:
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


@cases(__file__, "places")
def test_the_errors_of_a_body_are_few(body: str, place: list[str | int], given: dict[str, Any] | None) -> None:
    """pydantic describes each error in a kilobyte: a body of 8 MiB took gigabytes."""
    kind, sent = getattr(bodies, body), {"model": "tiny", **(given or {})}
    assert errors(kind, sent | FIELDS) == 1
    for value in (*WRONG, FIELDS):
        assert errors(kind, with_value(sent, place, value)) < 32


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
