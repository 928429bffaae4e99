"""Calls of tools in the text of an answer."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, strategies as st
from llguidance import LLMatcher, LLTokenizer

from symbiosis_priv.errors import ConfigError
from tenant.endpoint.api.bodies import Function
from tenant.endpoint.api.routes.tools import ToolText, arguments_of, calling, closed, tagged

CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'


def read(text: str, *, in_tags: bool, cuts: list[int]) -> tuple[str, list[Any]]:
    reader = ToolText(tagged=in_tags, names={"weather"})
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    content = ""
    for begin, end in zip([0, *ends], ends, strict=False):
        content += reader.add(text[begin:end])
    rest, calls = reader.end()
    return content + rest, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


FOUND = [("weather", '{"city": "Bern"}')]


@given(st.lists(st.integers(0, 140), max_size=20))
def test_calls_are_found_wherever_pieces_end(cuts: list[int]) -> None:
    two = f"Let me see.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>"
    assert read(two, in_tags=True, cuts=cuts) == ("Let me see.", FOUND * 2)
    assert read(f" {CALL}", in_tags=False, cuts=cuts) == ("", FOUND)
    assert read(f"[{CALL}, {CALL}]", in_tags=False, cuts=cuts) == ("", FOUND * 2)
    for text in (
        "a < b <tool",
        "<tool_call>{not JSON",
        CALL.replace("weather", "other"),
        CALL.replace('"Bern"', "1e999"),
        f"See {CALL}",
        '{"a": 1}',
        "[1]",
        "",
        "[" * 130,
    ):
        for in_tags in (True, False):
            assert read(text, in_tags=in_tags, cuts=cuts) == (text, [])


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda one: st.lists(one) | st.dictionaries(st.text(), one), max_leaves=5)


@given(VALUES | st.dictionaries(st.text(), VALUES), st.booleans(), st.sampled_from(["arguments", "parameters"]))
def test_the_arguments_of_a_call_are_json_of_an_object(value: Any, encoded: bool, key: str) -> None:
    """What an answer has is taken in the next turn: clients parse the arguments, and templates write an object."""
    text = json.dumps({"name": "weather", key: json.dumps(value) if encoded or isinstance(value, str) else value})
    content, calls = read(f"<tool_call>{text}</tool_call>", in_tags=True, cuts=[])
    if value is None or isinstance(value, dict):
        ((_, arguments),) = calls
        assert json.loads(arguments) == arguments_of(arguments) == (value or {})
    else:
        assert (content, calls) == (f"<tool_call>{text}</tool_call>", [])


@pytest.mark.parametrize("nothing", ["", " ", "null", "{}"])
def test_a_call_without_arguments_has_an_empty_object(nothing: str) -> None:
    text = json.dumps({"name": "weather", "arguments": nothing})
    assert read(text, in_tags=False, cuts=[]) == ("", [("weather", "{}")])


def test_white_space_in_a_call_takes_linear_time() -> None:
    """A client can make the model write white space (`logit_bias`), and the event loop of all clients reads it."""
    begun = time.thread_time()
    assert read(f"<tool_call>{' ' * 100_000}x", in_tags=True, cuts=[])[1] == []
    assert time.thread_time() - begun < 5  # a millisecond; a minute if the time is quadratic


SCHEMA = {"properties": {"city": {"enum": ["Bern"]}}, "required": ["city"], "additionalProperties": False}
TOOLS = [Function(name="weather", parameters=SCHEMA), Function(name="now", parameters={"additionalProperties": False})]
IN_TAGS, ALONE = "{% if tools %}<tool_call>{% endif %}", '{% if tools %}{"name": ..., "arguments": ...}{% endif %}'
NOW = '{"name": "now", "arguments": {}}'


def allows(text: str, template: str, **said: Any) -> tuple[bool, bool]:
    """Whether the grammar allows an answer to begin with a text, and to end with it."""
    rules = LLMatcher.grammar_from_lark(calling(TOOLS, template, **said))
    matcher = LLMatcher(LLTokenizer("byte"), rules, log_level=0)
    begins = matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
    return begins, begins and matcher.is_accepting()


def test_calls_that_are_not_forced_follow_their_schemas() -> None:
    def tag(call: str) -> str:
        return f"<tool_call>\n{call}\n</tool_call>"

    two = f"See{tag(CALL)}\n{tag(NOW)}."
    for text in ("", "a < b <tool", "{", f"See {CALL}", f"See{tag(CALL)}", two):
        assert allows(text, IN_TAGS, forced=False) == (True, True)
    wrong = [CALL.replace("Bern", "Rome"), CALL.replace("weather", "other"), "x", '{"name": "now", "arguments": {"a"']
    for call in wrong:
        assert not any(allows(f"See{tag(call)}", IN_TAGS, forced=False))
        assert not any(allows(tag(call), IN_TAGS, forced=True))
        assert not any(allows(call, ALONE, forced=True))
        assert allows(call, ALONE, forced=False) == (call == "x", call == "x")
    assert allows(f"See{tag(CALL)}", IN_TAGS, forced=False, parallel=False) == (True, True)
    assert not any(allows(two, IN_TAGS, forced=False, parallel=False))
    for text, forced in ((tag(NOW), True), ("", False), (tag(CALL), True), ("See", False)):
        assert allows(text, IN_TAGS, forced=True)[1] == forced
    for text, forced in ((NOW, True), (CALL, True), ("See {", False), ("", False)):
        assert allows(text, ALONE, forced=False) == (True, True)
        assert allows(text, ALONE, forced=True)[1] == forced
    assert not any(allows(" [", ALONE, forced=False))


def test_strict_closes_objects_that_do_not_say_what_else_they_have() -> None:
    part = {"type": "object", "properties": {"items": {"type": ["object", "null"]}}, "required": ["items"]}
    schema = {"$defs": {"a": part}, "anyOf": [part, {"$ref": "#/$defs/a"}], "items": part}
    shut: dict[str, Any] = {
        **part,
        "properties": {"items": {"type": ["object", "null"], "additionalProperties": False}},
    }
    shut["additionalProperties"] = False
    assert closed(schema) == {"$defs": {"a": shut}, "anyOf": [shut, {"$ref": "#/$defs/a"}], "items": shut}
    for left in ({"type": "object", "additionalProperties": True}, {"type": "object", "allOf": [part]}, True, {}):
        assert closed(left) == left
    assert "additionalProperties" not in part
    rules = [calling([Function(name="f", strict=strict)], ALONE, forced=True) for strict in (True, False)]
    assert ['"additionalProperties": false' in one for one in rules] == [True, False]


def test_formats_that_are_not_known_are_refused() -> None:
    assert tagged("{% if tools %}<tool_call>{% endif %}")
    assert not tagged('{% if tools %}{"name": ..., "parameters": ...}{% endif %}')
    for template in ("no calls", "{% if tools %}<tool_call><function=x>{% endif %}", "{% if tools %}code{% endif %}"):
        with pytest.raises(ConfigError):
            tagged(template)
