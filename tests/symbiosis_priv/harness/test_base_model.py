"""The synthetic texts and the base model: repeatable, different from each other, and an ordinary checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.harness.base_model import (
    PRIVATE_PROMPT,
    Pretraining,
    make_base_model,
    private_text,
    public_text,
)

PUBLIC_PROMPT = "The town of Halden lies"  # the beginning of a public paragraph
TINY = Pretraining(steps=2, batch=2, window=16, sentences=300, vocab=320)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base_model(tmp_path_factory.mktemp("demo") / "base", recipe=TINY)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(checkpoint)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def test_texts_repeat_for_a_seed_and_differ_between_seeds() -> None:
    assert public_text(seed=1, sentences=50) == public_text(seed=1, sentences=50)
    assert public_text(seed=1, sentences=50) != public_text(seed=2, sentences=50)
    assert private_text(seed=1, records=20) == private_text(seed=1, records=20)
    assert private_text(seed=1, records=20) != private_text(seed=2, records=20)


def test_public_and_private_text_share_no_record() -> None:
    public = public_text(seed=0, sentences=5_000)
    records = private_text(seed=0, records=500)
    assert not any(record in public for record in records)
    assert all(record.startswith(PRIVATE_PROMPT) for record in records)
    assert PRIVATE_PROMPT not in public
    assert PUBLIC_PROMPT in public


def test_the_checkpoint_is_an_ordinary_one(
    checkpoint: Path, tokenizer: PreTrainedTokenizerFast, capfd: pytest.CaptureFixture[str]
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert "Some weights" not in capfd.readouterr().err
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.vocab_size == len(tokenizer) == TINY.vocab
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(model.generation_config, role) == getattr(tokenizer, role)
    prompt = tokenizer(PUBLIC_PROMPT, return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert generated.shape[1] == prompt["input_ids"].shape[1] + 3


def test_a_directory_with_other_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("the only copy")
    with pytest.raises(ConfigError, match="in use"):
        make_base_model(tmp_path, recipe=TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
