"""Models whose checkpoints are stored in 8 or 4 bits: everything is what it is for the same weights in floats."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError
from tenant import RemoteConfig, backend_of, rounded_model
from tenant.model.loading import load_model
from tenant.preparation.own_tensors import own_digest, write_slim
from tests import experts, forms, splitting
from tests.cases import cases
from tests.splitting import split_model

IDS = torch.arange(1, 13).view(2, 6)
EVERY = r"layers\.|lm_head|embed_tokens"


logits = partial(splitting.logits, ids=IDS)


def split(path: Path, **options: Any) -> Tensor:
    model = split_model(path, **options)
    with backend_of(model):
        assert not hasattr(model.config, "quantization_config")
        assert isinstance(model.hf_quantizer.quantization_config, RemoteConfig)
        return logits(model)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory, save_llama: Any) -> Path:
    path: Path = save_llama(tie_word_embeddings=False, vocab_size=96)
    return path


@cases(__file__, "forms")
def test_split_plain_and_rounded_models_are_those_of_the_same_weights_in_floats(
    form: str, untied: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Embeddings and head are stored in the form, too."""
    published = tmp_path / "published"
    wide = forms.publish(untied, published, form, chosen=EVERY)
    capfd.readouterr()
    assert torch.equal(split(published), split(wide))
    assert torch.equal(logits(load_model(published)), logits(load_model(wide)))
    assert torch.equal(logits(rounded_model(published)), logits(rounded_model(wide)))
    assert "MISSING" not in "".join(capfd.readouterr())  # transformers' report


@pytest.mark.parametrize("mode", ["all", "local"])
@pytest.mark.parametrize("family", ["GptOss", "DeepseekV3", "DeepseekV3 in FP4", "DeepseekV4"])
def test_experts_are_read_at_the_providers_and_here(family: str, mode: str, tmp_path: Path) -> None:
    source = experts.write(
        family.split()[0], tmp_path / "source", **{"intermediate_size": 64} if "Gpt" in family else {}
    )
    published = tmp_path / "published"
    if family == "DeepseekV4":  # its files have other names than its modules, and the tenant keeps weights in FP8
        wide = forms.publish(source, published, "fp8 of DeepSeek-V4", chosen=r"attn\.w|experts|^head")
    elif family == "GptOss":
        wide = forms.publish_mxfp4(source, published)
    else:
        form = "fp4 pairs" if "FP4" in family else "fp8 blocks, powers of two"
        wide = forms.publish(source, published, form, chosen=r"\.experts\.")
    assert torch.equal(split(published, experts=mode), split(wide, experts=mode))
    assert torch.equal(logits(load_model(published)), logits(load_model(wide)))


def test_a_slim_copy_keeps_the_form_and_the_digest(tmp_path: Path) -> None:
    source = experts.write("GptOss", tmp_path / "source", intermediate_size=64)
    forms.publish_mxfp4(source, tmp_path / "published")
    store = WeightStore(tmp_path / "published")
    manifest = store.manifest()
    slim, local = tmp_path / "slim", tmp_path / "local"
    kept, left_out = write_slim(store, manifest, slim)
    assert kept + left_out == sum(t.nbytes for t in load_file(store.path / "model.safetensors").values())
    write_slim(store, manifest, local, keep_experts=True)
    assert {n for n in load_file(local / "model.safetensors") if n.endswith("_blocks")}
    assert (
        own_digest(WeightStore(slim), manifest)
        == own_digest(store, manifest)
        == own_digest(WeightStore(local), manifest)
    )
    full = tmp_path / "published"
    assert torch.equal(split(slim, checkpoint=full, experts="all"), split(full, experts="all"))
    assert torch.equal(split(local, checkpoint=full, experts="local"), split(full, experts="local"))


def test_a_tensor_of_the_tenant_without_its_scales_is_refused(untied: Path, tmp_path: Path) -> None:
    forms.publish(untied, tmp_path / "published", "fp8 blocks", chosen=EVERY)
    tensors = load_file(tmp_path / "published" / "model.safetensors")
    del tensors["model.embed_tokens.weight_scale_inv"]
    save_file(tensors, tmp_path / "published" / "model.safetensors", metadata={"format": "pt"})
    for load in (split, load_model):
        with pytest.raises(CheckpointError, match=r"embed_tokens.*without its scales"):
            load(tmp_path / "published")
