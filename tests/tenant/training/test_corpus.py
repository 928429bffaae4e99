"""A tenant's data: the forms that are read, and what is refused, by line and by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.errors import ConfigError
from tenant.training.corpus import read
from tests.tenant.training.conftest import Write


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CALL = {"function": {"name": "add", "arguments": {"x": 1}}}
PARTS = [{"type": "text", "text": "4"}, {"type": "text", "text": "!"}]

CONVERTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "OpenAI's preferences": (
        {
            "input": {"messages": [user("2+2?")], "tools": [{"a": 1}], "parallel_tool_calls": None},
            "preferred_output": [reply("4")],
            "non_preferred_output": [reply("5")],
        },
        {"prompt": [user("2+2?")], "tools": [{"a": 1}], "chosen": [reply("4")], "rejected": [reply("5")]},
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "2 2", "output": "4"},
        {"messages": [user("Add.\n\n2 2"), reply("4")]},
    ),
    "Alpaca without input": (
        {"instruction": "Add.", "input": "", "output": "4"},
        {"messages": [user("Add."), reply("4")]},
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4", "weight": 1}]},
        {"messages": [user("2+2?"), reply("4", weight=1)]},
    ),
    "TRL's conversations": ({"conversations": [user("2+2?"), reply("4")]}, {"messages": [user("2+2?"), reply("4")]}),
    "texts in parts": ({"messages": [user("2+2?"), reply(PARTS)]}, {"messages": [user("2+2?"), reply("4!")]}),  # type: ignore[arg-type]
    "a developer": (
        {"messages": [{"role": "developer", "content": "Add."}, reply("4")]},
        {"messages": [{"role": "system", "content": "Add."}, reply("4")]},
    ),
    "arguments as a text": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "add", "arguments": '{"x": 1}'}}],
                }
            ]
        },
        {"messages": [reply("", tool_calls=[CALL])]},
    ),
    "tools as a text": (
        {"messages": [reply("4")], "tools": '[{"a": 1}]'},
        {"messages": [reply("4")], "tools": [{"a": 1}]},
    ),
    "fields without a value": (
        {"text": "a", "id": None, "tags": [], "more": {}},
        {"text": "a"},
    ),
    "a prompt in both answers": (
        {"chosen": [user("2+2?"), reply("4")], "rejected": [user("2+2?"), reply("5")]},
        {"prompt": [user("2+2?")], "chosen": [reply("4")], "rejected": [reply("5")]},
    ),
    "a prompt in both texts": (
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    ),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_rows_are_brought_into_trls_forms(name: str, write: Write) -> None:
    given, expected = CONVERTED[name]
    assert [row for _, row in read(write(given)).rows] == [expected]


PREFERENCE = CONVERTED["OpenAI's preferences"][0]
WRONG: dict[str, tuple[list[Any], str]] = {
    "no JSON": (["{"], "line 1: this is not one whole JSON object"),
    "an object on several lines": (["{", '"text": "a"}'], "line 1: this is not one whole JSON object"),
    "an array": (["[]"], "line 1: Expected `object`"),
    "another type": ([{"text": 3}], r"line 1: .*\$\.text"),
    "no known form": ([{"text": "a"}, {"prompt": "a"}], "line 2: prompt do not go together"),
    "two forms": ([{"text": "a", "prompt": "b", "completion": "c"}], "line 1: completion, prompt, text do not go"),
    "mixed forms": ([{"text": "a"}, {"prompt": "b", "completion": "c"}], "line 2: every line"),
    "texts and chats": (
        [{"prompt": "b", "completion": "c"}, {"prompt": [user("b")], "completion": [reply("c")]}],
        "line 2",
    ),
    "a text and a chat": ([{"prompt": "b", "completion": [reply("c")]}], "line 1: completion, prompt do not go"),
    "nothing": ([""], "holds no lines"),
    "another field": ([{"text": "a", "id": 0}], "line 1: the field 'id' would not be learned; remove it"),
    "functions": ([{"messages": [reply("a")], "functions": [{}]}], "line 1: the field 'functions' .*write tools"),
    "ratings": ([{"prompt": "a", "completion": "b", "label": False}], "line 1: the field 'label' .*KTOTrainer"),
    "tools of a text": ([{"text": "a", "tools": [{"b": 1}]}], "line 1: text, tools do not go together"),
    "an option of OpenAI's": (
        [{**PREFERENCE, "input": {"messages": [user("a")], "parallel_tool_calls": False}}],
        "'parallel_",
    ),
    "nobody answers": ([{"messages": [user("a")]}], "line 1: .*assistant"),
    "nobody is learned": ([{"messages": [user("a"), reply("b", weight=0)]}], "line 1: .*assistant"),
    "half a weight": ([{"messages": [user("a"), reply("b", weight=0.5)]}], r"line 1: .*weight"),
    "no content": ([{"messages": [user("a"), {"role": "assistant"}]}], "line 1: .*assistant has no content"),
    "a picture": ([{"messages": [user([{"type": "image"}])]}], r"line 1: .*content\[0\]"),  # type: ignore[arg-type]
    "a call without arguments": (
        [{"messages": [reply("", tool_calls=[{"function": {"name": "a"}}])]}],
        "line 1: .*arguments",
    ),
    "arguments that are no JSON": (
        [{"messages": [reply("", tool_calls=[{"function": {"name": "a", "arguments": "{"}}])]}],
        "line 1: .*not JSON",
    ),
    "one answer only": (
        [{key: PREFERENCE[key] for key in ("input", "preferred_output")}],
        "line 1: chosen, prompt, tools do",
    ),
    "an answer of a user": ([PREFERENCE | {"preferred_output": [user("4")]}], "line 1: an answer has another role"),
    "answers to nothing": (
        [{"chosen": [reply("a")], "rejected": [reply("b")]}],
        "line 1: chosen and rejected begin with different",
    ),
    "nobody known": ([{"conversations": [{"from": "observation", "value": "a"}]}], "line 1: .*'observation'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named_with_their_line(name: str, write: Write) -> None:
    lines, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        read(write(*lines))


@given(st.lists(st.text(st.characters(codec="utf-8")), min_size=1), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_lines_end_at_line_feeds_only(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], end: str, mark: bool
) -> None:
    """Not at U+2028 or form feeds, which are characters of a text, nor at carriage returns; with and without a mark."""
    file = tmp_path_factory.getbasetemp() / "lines.jsonl"
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False, separators=(",", ":\r")) + end for text in texts)
    file.write_bytes(lines.encode("utf-8-sig" if mark else "utf-8"))
    assert [row["text"] for _, row in read(file).rows] == texts


def test_documents_of_plain_text_are_paragraphs_or_lines(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    for content, documents in (
        ("one\u2028line\n\ntwo\flines\nof one\n", ["one\u2028line", "two\flines\nof one"]),
        ("one\u2028line\ntwo\fhalves\x1d\n", ["one\u2028line", "two\fhalves"]),
        ("{a set} and\n[a list]\n", ["{a set} and", "[a list]"]),  # braces alone are not JSON
    ):
        for data in (content.encode(), content.replace("\n", "\r\n").encode("utf-8-sig")):
            file.write_bytes(data)
            assert [row["text"] for _, row in read(file).rows] == documents
    for name in ("t.txt", "t.jsonl"):
        (tmp_path / name).write_bytes("Müller".encode("latin-1"))
        with pytest.raises(ConfigError, match=r"not UTF-8 text .*byte 1.; save it as UTF-8"):
            read(tmp_path / name)


def test_json_is_not_learned_as_plain_text(write: Write) -> None:
    pair = {"prompt": "a", "completion": "b"}
    for name in ("p.JSONL", "p.ndjson"):
        assert read(write(pair, name=name)).form == "pairs"
    for name, lines in (("p.json", [[pair]]), ("p.txt", [pair, pair]), ("array.txt", [[pair, pair]])):
        with pytest.raises(ConfigError, match=r"\.jsonl"):
            read(write(*lines, name=name))
    with pytest.raises(ConfigError, match=r"\.jsonl"):
        read(write(pair, '{"prompt": "a", "compl', name="cut.txt"))


def test_chats_need_a_template(write: Write, tmp_path: Path) -> None:
    for line in ({"messages": [reply("a")]}, PREFERENCE, {"prompt": [user("a")], "completion": [reply("b")]}):
        with pytest.raises(ConfigError, match="no chat template"):
            read(write(line), model=tmp_path)
    assert read(write({"prompt": "a", "chosen": "b", "rejected": "c"}), model=tmp_path).form == "preferences"
