"""The tokens that the model reads and learns: those that TRL prepares, and what a chat template cannot say."""

import json
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import processors
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis_priv.errors import ConfigError
from tenant.cli import check
from tenant.training.corpus import read, to_blocks
from tenant.training.examples import NOT_LEARNED, Example, columns, learned_parts, make_examples, rows_of
from tests.cases import cases, table
from tests.tenant.training.conftest import TEMPLATE, Write
from tests.tenant.training.test_corpus import CALL, reply, user

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def learned(example: Example, tokenizer: Any) -> list[str]:
    """The parts of an example that are learned."""
    assert all(label in (NOT_LEARNED, token) for token, label in zip(*example, strict=True))
    parts = list(learned_parts(example, tokenizer))
    assert "".join(text for text, _ in parts) == tokenizer.decode(example.input_ids)
    return [text for text, is_learned in parts if is_learned]


def encoded(path: Path, tokenizer: Any, *, length: int = 10_000) -> list[Any]:
    return make_examples(read(path), tokenizer, length=length).found


TURNS = [user("What is 1?"), reply("It is 1."), user("Why?"), reply("So.")]
FORMS = table(__file__, "forms")


def twenty(name: str) -> list[dict[str, Any]]:
    """Rows of a form, with a number each; replies and questions differ in length."""
    return [json.loads(FORMS[name]["row"].replace("$i", str(i)).replace("$w", "Why?" * (1 + i % 3))) for i in range(20)]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", FORMS)
def test_the_tokens_are_those_that_trl_prepares(name: str, write: Write, tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = (TEMPLATES / f"{FORMS[name]['template']}.jinja").read_text()
    rows = twenty(name)
    found = encoded(write(*rows), tokenizer)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    model, preferences = LlamaForCausalLM(config), "chosen" in rows[0]
    given: dict[str, Any] = {"output_dir": str(tmp_path), "report_to": [], "bf16": False, "max_length": None}
    kind: Any = trl.DPOTrainer if preferences else trl.SFTTrainer
    trainer = kind(
        model,
        args=trl.DPOConfig(**given)
        if preferences
        else trl.SFTConfig(**given, assistant_only_loss="messages" in rows[0]),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]),
    )
    if preferences:
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        assert [columns(one) for one in found] == trainer.train_dataset.select_columns(names).to_list()
    elif name == "text":
        whole = [token for one in trainer.train_dataset for token in one["input_ids"]]
        assert to_blocks([one["text"] for one in rows], tokenizer, length=len(whole)) == [whole]
    else:
        assert [columns(one) for one in found] == trainer.train_dataset.select_columns(
            ("input_ids", "labels")
        ).to_list()
    assert all(any(label != NOT_LEARNED for label in one.labels) for one in rows_of(found))


@pytest.mark.parametrize("name", FORMS)
def test_check_prints_examples_of_every_form_with_what_is_learned(
    name: str, write: Write, tokenizer: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tenant check --data FILE --show 2`."""
    tokenizer.chat_template = (TEMPLATES / f"{FORMS[name]['template']}.jinja").read_text()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(tokenizer.chat_template)
    monkeypatch.setattr("tenant.model.loading.load_tokenizer", lambda _: tokenizer)
    path = write(*twenty(name))
    check.check(model=str(tmp_path), text=path, show=2, sequence_length=10_000)
    shown = capsys.readouterr().out
    rows = rows_of(encoded(path, tokenizer)[:2])
    assert shown.count("learned between [[ and ]]") == len(rows)
    for one in rows:
        text = "".join(f"[[{part}]]" if is_learned else part for part, is_learned in learned_parts(one, tokenizer))
        assert text in shown
        assert "[[" in text


@pytest.mark.parametrize("template", [TEMPLATE, "qwen3"], ids=["by prefix", "by template"])
def test_a_message_with_weight_0_is_not_learned(template: str, write: Write, tokenizer: Any) -> None:
    tokenizer.chat_template = template if template == TEMPLATE else (TEMPLATES / f"{template}.jinja").read_text()
    chat = [user("Hi"), reply("BAD", weight=0), user("Bye"), reply("GOOD", weight=1), reply("BEST")]
    (example,) = encoded(write({"messages": chat}), tokenizer)
    parts = learned(example, tokenizer)
    assert len(parts) == 2
    assert [word for part in parts for word in ("BAD", "GOOD", "BEST") if word in part] == ["GOOD", "BEST"]
    assert "BAD" in tokenizer.decode(example.input_ids)


OPENS = TEMPLATE.replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")
STRICT = "{{ messages[0].role }}" + TEMPLATE  # refuses an empty chat
TEXTS = TEMPLATE.replace(  # needs the arguments as a text
    "{{ message.content }}",
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.name + ': ' + "
    "call.function.arguments }}{% endfor %}",
)
QUOTED = TEMPLATE.replace("message.content", "(message.content | tojson if loop.first else message.content | trim)")
MODES = TEMPLATE.replace(  # a word is an option, as in SmolLM3's
    "{{ message.content }}",
    "{{ 'Do not reason. ' if '/no_think' in message.content }}{{ message.content | replace('/no_think', '') }}",
)
CALLS = TEMPLATE.replace("{{ message.content }}", "{{ message.content }}{{ (message.tool_calls or []) | tojson }}")


@pytest.mark.parametrize(
    ("template", "chat", "expected"),
    [
        (TEMPLATE, TURNS, ["It is 1.<|end|>", "So.<|end|>"]),
        (TEMPLATE, [user("<|assistant|>x<|end|>"), reply("y")], ["y<|end|>"]),
        (OPENS, TURNS, ["It is 1.<|end|>", "So.<|end|>"]),
        (OPENS, [user("Hi"), reply("<think>Hm.</think>Yes")], ["Hm.</think>Yes<|end|>"]),
        (OPENS, [user("Hi"), reply("<table>")], ["<table><|end|>"]),
        (STRICT, TURNS[1:], ["It is 1.<|end|>", "So.<|end|>"]),
        (CALLS, [user("Hi"), reply("", tool_calls=[CALL])], [json.dumps([CALL]) + "<|end|>"]),
        (TEXTS, [user("Hi"), reply("", tool_calls=[CALL])], ['add: {"x": 1}<|end|>']),
        (QUOTED, [user('"Hi"\n'), reply("So. ")], ["So.<|end|>"]),
        (MODES, [user("/no_think Hi"), reply("So.")], ["So.<|end|>"]),
    ],
)
def test_without_marks_a_message_is_found_by_what_precedes_it(
    template: str, chat: list[Any], expected: list[str], write: Write, tokenizer: Any
) -> None:
    tokenizer.chat_template = template
    (example,) = encoded(write({"messages": chat}), tokenizer)
    assert learned(example, tokenizer) == expected


@pytest.mark.parametrize("template", [TEMPLATE, "phi3"], ids=["by prefix", "by template"])
def test_white_space_is_learned_where_the_tokenizer_leaves_it_out_of_tokens_places(
    template: str, write: Write, tokenizer: Any
) -> None:
    """As Llama 3's does: it says that a token of spaces only is nowhere."""
    tokenizer.chat_template = template if template == TEMPLATE else (TEMPLATES / f"{template}.jinja").read_text()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    chat = [user("Hi "), reply("if x:\n    y\n"), user(" Bye"), reply("  So  it is. ")]
    (example,) = encoded(write({"messages": chat}), tokenizer)
    first, second = learned(example, tokenizer)
    assert first.strip("\n") == "if x:\n    y\n<|end|>"
    assert second.startswith("  So  it is. <|end|>")


@cases(__file__, "left_out")
def test_what_a_template_leaves_out_is_refused_by_name(
    content: str | None, template: str | None, row: str, says: str, write: Write, tokenizer: Any
) -> None:
    tokenizer.chat_template = template or TEMPLATE.replace("{{ message.content }}", content or "{{ message.content }}")
    before = {"messages": [reply("x")]} if "messages" in row else {"prompt": [user("x")], "completion": [reply("x")]}
    with pytest.raises(ConfigError, match=f"line 2: .*{says}"):
        encoded(write(before, row), tokenizer)


def test_long_examples_are_cut_and_those_left_out_are_counted_apart(write: Write, tokenizer: Any) -> None:
    file = write(
        {"prompt": "abc", "completion": "defgh"},
        {"prompt": "a", "completion": "b"},
        {"prompt": "far too long", "completion": "nothing is left of this"},
    )
    examples = make_examples(read(file), tokenizer, length=5)
    assert [learned(example, tokenizer) for example in examples.found] == [["de"], ["b</s>"]]
    assert (examples.cut, examples.left_out) == (1, 1)
    with pytest.raises(ConfigError, match="--sequence-length"):
        encoded(file, tokenizer, length=1)
    alike = {"prompt": "a", "chosen": "bcd", "rejected": "bce"}
    examples = make_examples(read(write(alike, alike | {"chosen": "x"})), tokenizer, length=3)
    assert (len(examples.found), examples.left_out) == (1, 1)


def test_texts_are_packed_like_plain_text(write: Write, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    lines = write({"text": "one\u2028line"}, {"text": "two"})
    plain = write("one\u2028line\n", "two", name="plain.txt")
    assert encoded(lines, tokenizer, length=4) == encoded(plain, tokenizer, length=4)
    (example,) = encoded(lines, tokenizer, length=100)
    assert learned(example, tokenizer) == ["one\u2028line</s>two</s>"]
    assert "fewer than a block of 100" in caplog.text
