"""Chats: what is sent again, what an error leaves behind, and whose template is used."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from symbiosis_priv.errors import CheckpointError, ConfigError, DeadlineExceededError
from tenant.model.hf import RemoteConfig
from tenant.model.loading import adapter_chat_template
from tenant.training.generate import Conversation, generate, open_model
from tenant.training.options import Decoding

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }} {% endfor %}"
FEW = Decoding(max_new_tokens=4)


@pytest.fixture(scope="module")
def opened(tiny: Path) -> Any:
    model, tokenizer = open_model(tiny, remote=RemoteConfig(masking="simulate"))
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


def test_a_message_is_read_once_and_changes_nothing(opened: Any) -> None:
    model, tokenizer = opened
    rows: list[int] = []
    hook = model.register_forward_pre_hook(lambda *args: rows.append(args[2]["input_ids"].shape[1]), with_kwargs=True)
    chat = Conversation(model, tokenizer, decoding=FEW)
    first = chat.answer("The weather")
    assert rows[1:] == [1, 1, 1]
    rows.clear()
    second = chat.answer("was cold")
    hook.remove()
    whole = f"The weather {first} was cold "
    assert rows[0] < len(tokenizer(whole)["input_ids"])
    assert second == generate(model, tokenizer, whole, decoding=FEW)


def test_the_next_message_does_not_show_where_an_answer_of_fixed_length_has_ended(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new prompt contains the answer, so its number of rows would show the answer's length."""
    model, tokenizer = opened
    rows: list[int] = []
    hook = model.register_forward_pre_hook(lambda *args: rows.append(args[2]["input_ids"].shape[1]), with_kwargs=True)
    decoding, seen = replace(FEW, fixed_length=True), []
    for length in (1, 3, 4):
        with monkeypatch.context() as patch:
            patch.setattr("tenant.training.generate._up_to", lambda _, tokens, length=length: tokens[:length])
            chat = Conversation(model, tokenizer, decoding=decoding)
            answers = chat.answer("The weather"), chat.answer("was cold")
        seen.append(tuple(rows))
        whole = f"The weather {answers[0]} was cold "
        assert generate(model, tokenizer, whole, decoding=FEW).startswith(answers[1])
        rows.clear()
    hook.remove()
    assert len(answers[0]) == 4
    assert len(set(seen)) == 1


def test_an_error_leaves_the_conversation_as_it_was(opened: Any) -> None:
    model, tokenizer = opened
    chat, fresh = Conversation(model, tokenizer, decoding=FEW), Conversation(model, tokenizer, decoding=FEW)
    assert chat.answer("The weather") == fresh.answer("The weather")

    def fail(*args: Any) -> None:
        raise DeadlineExceededError("lost")

    hook = model.model.layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(DeadlineExceededError):
        chat.answer("is lost")
    hook.remove()
    assert chat.answer("was cold") == fresh.answer("was cold")


def test_an_answer_can_be_stopped(opened: Any) -> None:
    model, tokenizer = opened
    whole = Conversation(model, tokenizer, decoding=FEW).answer("The weather")
    chat = Conversation(model, tokenizer, decoding=FEW)
    part = chat.answer("The weather", stop=lambda: True)
    assert part != whole
    assert whole.startswith(part)


def test_a_template_of_an_adapter_is_read_with_a_limit(tmp_path: Path) -> None:
    assert adapter_chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    assert adapter_chat_template(tmp_path) == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert adapter_chat_template(tmp_path) == "new"
    for damaged in (b"\xff", bytes(1 << 21)):
        (tmp_path / "chat_template.jinja").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="chat template"):
            adapter_chat_template(tmp_path)


def test_a_template_that_refuses_a_message_is_an_error(opened: Any) -> None:
    model, tokenizer = opened
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    try:
        with pytest.raises(ConfigError, match="template refuses"):
            Conversation(model, tokenizer).answer("Hello")
    finally:
        tokenizer.chat_template = TEMPLATE
