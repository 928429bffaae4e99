"""A tenant's data: the forms that are read, and what is refused, by line and by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.errors import ConfigError
from tenant.training.corpus import read
from tests.cases import cases, table
from tests.tenant.training.conftest import Write


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CALL = {"function": {"name": "add", "arguments": {"x": 1}}}
PREFERENCE = json.loads(table(__file__, "converted")["OpenAI's preferences"]["line"])


@cases(__file__, "converted")
def test_rows_are_brought_into_trls_forms(line: str, row: str, write: Write) -> None:
    assert [found for _, found in read(write(line)).rows] == [json.loads(row)]


@cases(__file__, "wrong")
def test_mistakes_are_named_with_their_line(lines: list[str], says: str, write: Write) -> None:
    with pytest.raises(ConfigError, match=says):
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
