"""Generation: whose template and whose tokenizer are used."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from symbiosis_priv.errors import CheckpointError, ConfigError
from tenant.endpoint import serving
from tenant.endpoint.options import Serving
from tenant.model.hf import RemoteConfig
from tenant.model.loading import load_tokenizer
from tenant.training import finetune as finetuning, generate as generation
from tenant.training.finetune import finetune
from tenant.training.generate import generate, open_model
from tenant.training.options import Decoding, FineTuning

SIMULATED = RemoteConfig(masking="simulate")


def test_a_chat_is_the_models_template(tiny: Path) -> None:
    model, tokenizer = open_model(tiny, remote=SIMULATED)
    with pytest.raises(ConfigError, match="no chat template"):
        generate(model, tokenizer, "Hello", chat=True)
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }} "
    decoding = Decoding(max_new_tokens=4)
    answer = generate(model, tokenizer, "The weather", chat=True, decoding=decoding)
    assert answer == generate(model, tokenizer, "The weather ", decoding=decoding)
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ConfigError, match="template refuses"):
        generate(model, tokenizer, "Hello", chat=True)


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
