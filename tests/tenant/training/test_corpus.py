"""A tenant's data: accepted files, and the tokens that the model learns."""

import json
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from symbiosis_priv.errors import ConfigError
from tenant.training.corpus import NOT_LEARNED, check, load_examples, to_blocks

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte, and the template's tokens."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(sorted(alphabet))}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    whole.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|end|>"]})
    whole.chat_template = TEMPLATE
    return whole


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def learned(example: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    assert len(example.labels) == len(example.input_ids)
    assert all(label in (NOT_LEARNED, token) for label, token in zip(example.labels, example.input_ids, strict=True))
    return str(tokenizer.decode([label for label in example.labels if label != NOT_LEARNED]))


def test_text_lines_are_packed_like_plain_text(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    lines = write(tmp_path / "t.jsonl", {"text": "one\u2028line", "id": 3}, {"text": "two"})
    plain = tmp_path / "t.txt"
    plain.write_text("one\u2028line\n\ntwo", encoding="utf-8")
    assert load_examples(lines, tokenizer, length=4) == load_examples(plain, tokenizer, length=4)
    examples, shortened = load_examples(lines, tokenizer, length=100)
    assert learned(examples[0], tokenizer) == "one\u2028line</s>two</s>"
    assert shortened == 0


def test_the_completion_of_a_pair_is_learned(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    lines = write(
        tmp_path / "p.jsonl", {"prompt": "2+2=", "completion": "4"}, {"prompt": "", "completion": "no prompt"}
    )
    (first, second), _ = load_examples(lines, tokenizer, length=100)
    assert tokenizer.decode(first.input_ids) == "2+2=4</s>"
    assert learned(first, tokenizer) == "4</s>"
    assert learned(second, tokenizer) == "no prompt</s>"


def test_the_assistants_messages_of_a_chat_are_learned(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye <|assistant|>"), ("assistant", "See you")]
    lines = write(tmp_path / "c.jsonl", {"messages": [{"role": role, "content": words} for role, words in turns]})
    (example,), _ = load_examples(lines, tokenizer, length=100)
    assert learned(example, tokenizer) == "Hello<|end|>See you<|end|>"
    start = "<|user|>Hi<|end|><|assistant|>Hello<|end|>"
    assert str(tokenizer.decode(example.input_ids)).startswith(start)


def test_a_reply_that_the_template_rewrites_later_is_input_only(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasoning models do this: they drop the thoughts of earlier turns."""
    forgets = TEMPLATE.replace("{{ message.content }}", "{{ message.content if loop.last else message.content[:1] }}")
    monkeypatch.setattr(tokenizer, "chat_template", forgets)
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "See you")]
    lines = write(tmp_path / "c.jsonl", {"messages": [{"role": role, "content": words} for role, words in turns]})
    with pytest.raises(ConfigError, match="line 1: the rendered chat has no message of role assistant"):
        load_examples(lines, tokenizer, length=100)


def test_long_examples_are_cut_and_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    lines = write(
        tmp_path / "p.jsonl",
        {"prompt": "abc", "completion": "defgh"},
        {"prompt": "a", "completion": "b"},
        {"prompt": "far too long", "completion": "nothing is left of this"},
    )
    examples, shortened = load_examples(lines, tokenizer, length=5)
    assert [learned(example, tokenizer) for example in examples] == ["de", "b</s>"]
    assert shortened == 2
    with pytest.raises(ConfigError, match="--sequence-length"):
        load_examples(lines, tokenizer, length=1)


PREFERENCE: dict[str, Any] = {
    "input": {
        "messages": [{"role": role, "content": words} for role, words in (("assistant", "Hi"), ("user", "2+2?"))]
    },
    "preferred_output": [{"role": "assistant", "content": "4"}],
    "non_preferred_output": [{"role": "assistant", "content": "Well, 4"}],
}


def test_both_answers_of_a_preference_are_learned_and_nothing_before(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    lines = write(tmp_path / "p.jsonl", PREFERENCE, PREFERENCE)
    pairs, shortened = load_examples(lines, tokenizer, length=100)
    assert [[learned(one, tokenizer) for one in pair] for pair in pairs] == [["4<|end|>", "Well, 4<|end|>"]] * 2
    assert shortened == 0
    length = len(pairs[0].preferred.input_ids)
    assert load_examples(lines, tokenizer, length=length)[1] == 2  # the other answer is longer
    with pytest.raises(ConfigError, match="--sequence-length"):
        load_examples(lines, tokenizer, length=length - 2)  # nothing is left of either answer


WRONG: dict[str, tuple[list[Any], str]] = {
    "no JSON": (["{"], "line 1 is not one whole JSON object"),
    "an object on several lines": (["{", '"text": "a"}'], "line 1 is not one whole JSON object"),
    "another type": ([{"text": 3}], "line 1: .*text"),
    "no known form": ([{"text": "a"}, {"prompt": "a"}], "line 2: .*completion"),
    "two forms": ([{"text": "a", "prompt": "b", "completion": "c"}], "line 1: "),
    "mixed forms": ([{"text": "a"}, {"prompt": "b", "completion": "c"}], "line 2: "),
    "nothing": ([""], "holds no lines"),
    "nobody answers": ([{"messages": [{"role": "user", "content": "a"}]}], "line 1: .*assistant"),
    "a preference without a second answer": (
        [{key: PREFERENCE[key] for key in ("input", "preferred_output")}],
        "line 1: .*non_preferred_output",
    ),
    "an answer of a user": (
        [PREFERENCE | {"preferred_output": [{"role": "user", "content": "4"}]}],
        "line 1: .*preferred_output",
    ),
    "two answers": ([PREFERENCE, PREFERENCE | {"preferred_output": PREFERENCE["preferred_output"] * 2}], "line 2: .*1"),
    "tools": ([PREFERENCE | {"input": {"messages": [], "tools": [{}]}}], r"line 1: .*\.tools"),
    "parts that are no text": ([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], "line 1: .*content"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named_with_their_line(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    lines, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        load_examples(write(tmp_path / "w.jsonl", *lines), tokenizer, length=10)


def test_chats_need_a_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    lines = write(tmp_path / "c.jsonl", {"messages": [{"role": "assistant", "content": "a"}]})
    with pytest.raises(ConfigError, match="no chat template"):
        load_examples(lines, tokenizer, length=10)


def test_byte_order_marks_and_line_ends_make_no_difference(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Files from Windows begin with a byte order mark, and end lines with two characters."""
    for name, words in (("t.txt", "one\n\ntwo\n"), ("t.jsonl", '{"text": "one"}\n{"text": "two"}\n')):
        file = tmp_path / name
        file.write_text(words)
        plain = load_examples(file, tokenizer, length=100)
        file.write_bytes(words.replace("\n", "\r\n").encode("utf-8-sig"))
        assert load_examples(file, tokenizer, length=100) == plain
    file.write_bytes("Müller".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"not UTF-8 text .*byte 1.; save it as UTF-8"):
        load_examples(file, tokenizer, length=100)


def test_a_text_shorter_than_a_block_is_named(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(to_blocks(["weather"], tokenizer, length=256)) == 1
    assert "fewer than a block of 256" in caplog.text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("small.jsonl", b'{"text":""}\n' * 50_000),
        ("small.txt", b"ab\n" * 200_000),
        ("array.txt", b"[" + b"{}," * 200_000 + b"{}]"),
        ("object.txt", b'{"a":[' + b"[]," * 200_000 + b"[]]}"),
    ],
)
def test_a_check_takes_no_more_memory_than_the_file(tmp_path: Path, name: str, content: bytes) -> None:
    """The endpoint checks files of its clients: 128 MiB of short lines took 3 GiB."""
    path = tmp_path / name
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ConfigError, match="JSON") if b"{}," in content or b"[]," in content else nullcontext():
        check(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(content) + (1 << 19)


def test_json_is_not_learned_as_plain_text(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    for name in ("p.JSONL", "p.ndjson"):
        (example,), _ = load_examples(write(tmp_path / name, {"prompt": "a", "completion": "b"}), tokenizer, length=100)
        assert learned(example, tokenizer) == "b</s>"
    pair = {"prompt": "a", "completion": "b"}
    for name, lines in (("p.json", [[pair]]), ("p.txt", [pair, pair]), ("array.txt", [[pair, pair]])):
        with pytest.raises(ConfigError, match=r"\.jsonl"):
            load_examples(write(tmp_path / name, *lines), tokenizer, length=100)
    (tmp_path / "cut.txt").write_text(json.dumps(pair) + '\n{"prompt": "a", "compl')
    with pytest.raises(ConfigError, match=r"\.jsonl"):
        load_examples(tmp_path / "cut.txt", tokenizer, length=100)
    (tmp_path / "t.txt").write_text("{a set} and\n[a list]\n")  # braces alone are not JSON
    assert load_examples(tmp_path / "t.txt", tokenizer, length=100)[0]
