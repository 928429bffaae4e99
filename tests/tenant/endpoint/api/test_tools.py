"""Calls of tools in the text of an answer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis_priv.errors import ConfigError
from tenant.endpoint.api.routes.tools import ToolText, tagged

CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'


def read(text: str, *, in_tags: bool, cuts: list[int]) -> tuple[str, list[Any]]:
    reader = ToolText(tagged=in_tags, names={"weather"})
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    content = ""
    for begin, end in zip([0, *ends], ends, strict=False):
        content += reader.add(text[begin:end])
    rest, calls = reader.end()
    return content + rest, [(call.function.name, call.function.arguments) for call in calls]


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


def test_formats_that_are_not_known_are_refused() -> None:
    assert tagged("{% if tools %}<tool_call>{% endif %}")
    assert not tagged('{% if tools %}{"name": ..., "parameters": ...}{% endif %}')
    for template in ("no calls", "{% if tools %}<tool_call><function=x>{% endif %}", "{% if tools %}code{% endif %}"):
        with pytest.raises(ConfigError):
            tagged(template)
