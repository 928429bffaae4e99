"""Chats: what is sent again, what an error leaves behind, and whose template is used."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from symbiosis_priv.errors import CheckpointError, ConfigError, DeadlineExceededError
from tenant.endpoint import serving
from tenant.endpoint.options import Serving
from tenant.model.hf import RemoteConfig
from tenant.model.loading import load_tokenizer
from tenant.training import finetune as finetuning, generate as generation
from tenant.training.finetune import finetune
from tenant.training.generate import Conversation, generate, open_model
from tenant.training.options import Decoding, FineTuning

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }} {% endfor %}"
FEW = Decoding(max_new_tokens=4)
SIMULATED = RemoteConfig(masking="simulate")


@pytest.fixture(scope="module")
def opened(tiny: Path) -> Any:
    model, tokenizer = open_model(tiny, remote=SIMULATED)
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


def add_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages * 2 }}")


def replace_tokens(folder: Path) -> None:
    copy = Path(shutil.copy2(folder / "tokenizer.json", folder / "copy"))
    copy.rename(folder / "tokenizer.json")


def serve(folder: Path) -> None:
    with serving.opened(folder, SIMULATED, name="x", adapters={}, options=Serving()):
        pass


def learn(folder: Path) -> None:
    data = folder.parent / "text"
    data.write_text("The weather was cold. " * 9)
    finetune(folder, data, folder.parent / "out", remote=SIMULATED, options=FineTuning(sequence_length=8))


COMMANDS: list[Any] = [
    (generation, partial(open_model, remote=SIMULATED), add_template),
    (serving, serve, replace_tokens),
    (finetuning, learn, replace_tokens),
]


@pytest.mark.parametrize(("module", "command", "change"), COMMANDS, ids=["generate", "serve", "finetune"])
def test_a_tokenizer_that_is_replaced_before_it_is_confirmed_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, command: Any, change: Any
) -> None:
    """Otherwise the rows of a text would follow a tokenizer or a template that nobody has confirmed."""
    folder = shutil.copytree(tiny, tmp_path / "model")

    def load_and_change(path: Path) -> Any:
        tokenizer = load_tokenizer(path)
        change(folder)
        return tokenizer

    monkeypatch.setattr(module, "load_tokenizer", load_and_change)
    with pytest.raises(CheckpointError, match="tokenizer"):
        command(folder)


def test_a_template_that_is_there_only_while_the_tokenizer_is_loaded_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, load = shutil.copytree(tiny, tmp_path / "model"), AutoTokenizer.from_pretrained

    def load_with_template(*args: Any, **options: Any) -> Any:
        add_template(folder)
        tokenizer = load(*args, **options)
        (folder / "chat_template.jinja").unlink()
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load_with_template)
    with pytest.raises(CheckpointError, match="changed"):
        load_tokenizer(folder)


def test_a_template_that_refuses_a_message_is_an_error(opened: Any) -> None:
    model, tokenizer = opened
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    try:
        with pytest.raises(ConfigError, match="template refuses"):
            Conversation(model, tokenizer).answer("Hello")
    finally:
        tokenizer.chat_template = TEMPLATE
