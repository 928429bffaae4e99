"""The synthetic texts and the base model: repeatable, different from each other, and an ordinary checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.harness.base_model import (
    PRIVATE_PROMPT,
    PUBLIC_PROMPT,
    Pretraining,
    cached_base_model,
    make_base_model,
    private_text,
    public_text,
)

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


@given(seed=st.integers(), count=st.integers(min_value=0, max_value=40))
def test_texts_have_the_length_asked_for(seed: int, count: int) -> None:
    assert len(private_text(seed=seed, records=count)) == count
    assert bool(public_text(seed=seed, sentences=count)) == bool(count)


def test_public_and_private_text_share_no_record() -> None:
    public = public_text(seed=0, sentences=5_000)
    records = private_text(seed=0, records=500)
    assert not any(record in public for record in records)
    assert all(record.startswith(PRIVATE_PROMPT) for record in records)
    assert PRIVATE_PROMPT not in public
    assert PUBLIC_PROMPT in public


def test_the_tenants_drugs_are_private() -> None:
    private = "\n".join(private_text(seed=0, records=500))
    public = public_text(seed=0, sentences=Pretraining().sentences)
    for drug in ("Cardolex", "Neurivane", "Pulmozide", "Glucavir", "Dermaquil"):
        assert drug in private
        assert drug not in public


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


@given(text=st.text())
def test_tokenizer_gives_back_every_string_without_special_tokens(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    assume(not any(token in text for token in tokenizer.all_special_tokens))
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_finished_model_is_used_again(tmp_path: Path) -> None:
    steps: list[int] = []

    def cached(scratch: str, recipe: Pretraining = TINY) -> Path:
        return cached_base_model(
            tmp_path / "cache",
            tmp_path / scratch,
            recipe=recipe,
            on_progress=lambda step, total, loss: steps.append(step),
        )

    made, again, other = cached("first"), cached("second"), cached("third", replace(TINY, seed=1))
    assert steps == [1, 2, 1, 2]
    assert made.is_relative_to(tmp_path / "first")
    assert other.is_relative_to(tmp_path / "third")
    assert again.parent == tmp_path / "cache"
    assert (again / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = cached_base_model(tmp_path / "file" / "cache", tmp_path / "scratch", recipe=TINY)
    assert (made / "model.safetensors").is_file()


def test_the_first_finished_model_is_kept(tmp_path: Path) -> None:
    """Two demos start together: the other one finishes while this one is training."""
    cache = tmp_path / "cache"

    def other(step: int, total: int, loss: float) -> None:
        if step == 1:
            cached_base_model(cache, tmp_path / "other", recipe=TINY)
            (only,) = cache.iterdir()
            (only / "first").touch()

    assert cached_base_model(cache, tmp_path / "own", recipe=TINY, on_progress=other).is_dir()
    (only,) = cache.iterdir()
    assert (only / "first").exists()


def test_a_directory_with_other_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("the only copy")
    with pytest.raises(ConfigError, match="in use"):
        make_base_model(tmp_path, recipe=TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_interrupted_training_leaves_no_directory(tmp_path: Path) -> None:
    def interrupt(step: int, total: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_base_model(tmp_path / "base", recipe=TINY, on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []
