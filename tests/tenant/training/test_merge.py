"""`tenant merge` writes what PEFT's `merge_and_unload` makes of the whole model."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from symbiosis_priv.errors import CheckpointError, ConfigError, SymbiosisError, UnsupportedModelError
from tenant.cli.app import app
from tenant.training import merge as merging
from tests import forms
from tests.adapters import peft_config, write_adapter
from tests.cases import table
from tests.compatibility.families import build

LINEARS = ["q_proj", "v_proj", "down_proj"]
METHODS = table(__file__, "methods")


def trained(model: Path, folder: Path, config: Any) -> Path:
    """A PEFT folder with random tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PEFT says that it saves embeddings beside an adapter on them
        write_adapter(AutoModelForCausalLM.from_pretrained(model, dtype="auto"), folder, config, scale=0.05)
    return folder


def quiet(done: int, total: int) -> None: ...


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def base(
    request: pytest.FixtureRequest, save_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    plain = AutoModelForCausalLM.from_pretrained(
        save_llama(vocab_size=96, attention_bias=True, tie_word_embeddings=False), dtype=getattr(torch, request.param)
    )
    folder = tmp_path_factory.mktemp("base")
    plain.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_the_weights_are_those_of_merge_and_unload(
    method: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = trained(base, tmp_path / "adapter", peft_config(**METHODS[method]))
    monkeypatch.setattr(merging, "_FILE_BYTES", 40_000)  # several files
    assert merging.merge(base, adapter, tmp_path / "merged", progress=quiet) > 0
    whole = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    expected = PeftModel.from_pretrained(whole, adapter).merge_and_unload().state_dict()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype="auto").state_dict()
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto", output_loading_info=True)
    merged, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    for name, tensor in merged.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in expected.items())


def test_all_adapted_parameters_of_a_module_are_merged(tmp_path: Path) -> None:
    """PEFT wraps experts once for each of their tensors."""
    build("GptOssForCausalLM").save_pretrained(tmp_path / "base")
    names = ["experts.gate_up_proj", "experts.down_proj"]
    adapter = trained(tmp_path / "base", tmp_path / "adapter", peft.LoraConfig(r=2, target_parameters=names))
    merging.merge(tmp_path / "base", adapter, tmp_path / "merged", progress=quiet)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    plain = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    for name, tensor in PeftModel.from_pretrained(whole, adapter).merge_and_unload().state_dict().items():
        assert torch.equal(merged[name], tensor), name
        assert torch.equal(plain[name], tensor) != name.endswith(tuple(names)), name


def test_a_checkpoint_in_4_bits_is_merged_in_its_own_dtype(base: Path, tmp_path: Path) -> None:
    wide = forms.publish(base, tmp_path / "published", "bitsandbytes nf4")
    adapter = trained(base, tmp_path / "adapter", peft.LoraConfig(r=4, target_modules=LINEARS))
    merging.merge(tmp_path / "published", adapter, tmp_path / "merged", progress=quiet)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    whole = AutoModelForCausalLM.from_pretrained(wide, dtype=merged.dtype)
    expected = PeftModel.from_pretrained(whole, adapter).merge_and_unload().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.state_dict().items())


def test_the_command_merges_without_a_provider(base: Path, tmp_path: Path) -> None:
    adapter = trained(base, tmp_path / "adapter", peft.LoraConfig(r=4, target_modules=LINEARS))
    arguments = ["merge", "--model", str(base), "--adapter", str(adapter), "--output", str(tmp_path / "merged")]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert "merged 6 layers" in ran.output
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, ConfigError)


def tied(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_what_cannot_be_merged_is_refused_and_leaves_no_folder(base: Path, tmp_path: Path) -> None:
    def refused(says: str, kind: type[SymbiosisError], config: Any, model: Path = base, spoil: Any = None) -> None:
        adapter = trained(base, tmp_path / f"adapter {says}", config)
        if spoil:
            path = adapter / "adapter_model.safetensors"
            save_file(spoil(load_file(path)), path, metadata={"format": "pt"})
        with pytest.raises(kind, match=says):
            merging.merge(model, adapter, tmp_path / "merged", progress=quiet)
        assert not (tmp_path / "merged").exists()

    lora = peft.LoraConfig(r=4, target_modules=LINEARS)
    embedding = {"base_model.model.model.embed_tokens.weight": torch.ones(96, 64)}
    prompts = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    pissa = peft.LoraConfig(r=4, init_lora_weights="pissa", target_modules=LINEARS)
    refused("prompts are not part of any weight", UnsupportedModelError, prompts)
    refused("starts from the base weights", UnsupportedModelError, pissa)
    tiny = peft.TinyLoraConfig(r=2, u=4, target_modules=LINEARS)
    refused("base weights|does not fit", SymbiosisError, tiny)
    biased = peft.LoraConfig(r=4, target_modules=["down_proj"], lora_bias=True)
    refused("PEFT cannot merge the adapter: .*lora_bias", UnsupportedModelError, biased)
    refused("not complete", CheckpointError, lora, spoil=lambda t: dict(list(t.items())[1:]))
    refused("no place for .*embed_tokens", CheckpointError, lora, spoil=lambda t: t | embedding)
    copied = tied(shutil.copytree(base, tmp_path / "tied"))
    heads = peft.LoraConfig(r=4, target_modules=["lm_head"])
    refused("are its LM head", UnsupportedModelError, heads, model=copied)


def test_a_folder_that_replaces_the_base_models_embeddings_is_refused(base: Path, tmp_path: Path) -> None:
    """PEFT saves a copy of the embeddings beside an adapter on them; this copy was changed."""
    adapter = trained(base, tmp_path / "adapter", peft.LoraConfig(r=4, target_modules=["embed_tokens"]))
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    (copy,) = [name for name in tensors if name.endswith("embed_tokens.base_layer.weight")]
    save_file(tensors | {copy: tensors[copy] + 1}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"would replace the base model's model\.embed_tokens\.weight"):
        merging.merge(base, adapter, tmp_path / "merged", progress=quiet)
