"""A tied LM head whose product is offloaded: the plain model's logits, and a table that cannot change."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from symbiosis_priv.checkpoints.layers import Scope
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError, UnsupportedMethodError
from tenant import backend_of, rounded_model
from tenant.model.remote_linear import RemoteLinear
from tenant.preparation.own_tensors import own_digest, write_slim
from tests.compatibility.families import build
from tests.splitting import split_model

IDS = torch.arange(3, 13).view(1, 10)


def save(model: Any, folder: Path) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("LlamaForCausalLM", tie_word_embeddings=True), tmp_path_factory.mktemp("tied"))


load = partial(split_model, tied_head=True)


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        (transformers.AutoModelForMaskedLM, "BertForMaskedLM"),  # its bias is tied, too
        (transformers.AutoModelForSeq2SeqLM, "T5ForConditionalGeneration"),  # it scales the input of a tied head
    ],
)
def test_logits_are_those_of_a_rounded_head(kind: Any, model: str, tmp_path: Path) -> None:
    path = save(build(model), tmp_path)
    split, rounded = load(path, kind=kind), rounded_model(path, kind=kind, tied_head=True)
    assert isinstance(split.get_output_embeddings(), RemoteLinear)
    inputs = {"decoder_input_ids": IDS} if split.config.is_encoder_decoder else {}
    with backend_of(split), torch.no_grad():
        logits = rounded(input_ids=IDS, **inputs).logits
        assert (split(input_ids=IDS, **inputs).logits - logits).abs().max() < 1e-5 * logits.abs().max()


def test_the_table_is_mapped_from_the_file(tied: Path) -> None:
    model = load(tied)
    backend_of(model).close()
    place = model.get_input_embeddings().weight.data_ptr()
    ranges = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [line[-1] for line in ranges if int(line[0].split("-")[0], 16) <= place < int(line[0].split("-")[1], 16)]
    assert mapped == [str(tied / "model.safetensors")]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_table_that_changes_is_refused(tied: Path) -> None:
    """The head would go on with the table of the checkpoint."""
    model = load(tied)
    with backend_of(model):
        table = model.get_input_embeddings().weight
        assert not table.requires_grad
        table.requires_grad_(True)
        with pytest.raises(UnsupportedMethodError, match="tied_head=False"):
            model(input_ids=IDS)
        table.requires_grad_(False)
        with pytest.raises(UnsupportedMethodError, match="tied_head=False"):
            model.tie_weights()
        assert model(input_ids=IDS).logits.shape[-1] == 96
        adapted = get_peft_model(model, LoraConfig(target_modules=["o_proj"], trainable_token_indices=[3, 5]))
        with pytest.raises(UnsupportedMethodError, match="base weight"):
            adapted(input_ids=IDS)
        with pytest.raises(UnsupportedMethodError):
            load(tied).resize_token_embeddings(100)


def test_the_table_stays_in_a_slim_checkpoint(tied: Path, tmp_path: Path) -> None:
    store = WeightStore(tied, scope=Scope(tied_head=True))
    manifest = store.manifest()
    write_slim(store, manifest, tmp_path / "slim")
    assert "model.embed_tokens.weight" in load_file(tmp_path / "slim" / "model.safetensors")
    slim = WeightStore(tmp_path / "slim", scope=Scope(tied_head=True))
    assert own_digest(slim, manifest) == own_digest(store, manifest)
    assert not slim.is_complete()


def test_a_head_that_is_stored_too_is_the_one_that_transformers_uses(tied: Path, tmp_path: Path) -> None:
    """transformers does not tie a head that is stored with other values, and ties the table to a head stored alone."""
    path = Path(shutil.copytree(tied, tmp_path / "both"))
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2 + 1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    store = WeightStore(path, scope=Scope(tied_head=True))
    assert torch.equal(store.floats(("lm_head",))[0].weight, tensors["lm_head.weight"])
    write_slim(store, store.manifest(), tmp_path / "slim")  # a tenant may keep the head
    assert load_file(tmp_path / "slim" / "model.safetensors").keys() >= {"lm_head.weight", "model.embed_tokens.weight"}
    manifest, before = store.manifest(), own_digest(store, store.manifest())
    tensors["lm_head.weight"] += 1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert own_digest(store, manifest) != before
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight"):
        load(path)
