"""Expert stacks are offloaded as whole layer groups, and no linear of a single expert is offloaded."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import MergeModulelist

from symbiosis_priv.checkpoints.discovery.skeleton import traced
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError
from tests.compatibility.families import small
from tests.experts import FAMILIES, join, write


@pytest.mark.parametrize("family", FAMILIES)
def test_both_stacks_of_a_layer_are_groups_with_the_models_weights(family: str, tmp_path: Path) -> None:
    """The matrices are those that transformers loads, however the checkpoint stores them."""
    path = write(family, tmp_path / "model")
    model = getattr(transformers, f"{family}ForCausalLM").from_pretrained(path, dtype=torch.float32)
    store = WeightStore(path, cache=tmp_path / "cache")
    stacks = [group for group in store.skeleton.groups if group.experts > 1]
    layers = [name for name, module in model.named_modules() if name.endswith(".experts")]
    assert [group.members[0] for group in stacks] == [f"{n}.{s}" for n in layers for s in ("gate_up_proj", "down_proj")]
    for index, group in enumerate(store.skeleton.groups):
        if group.experts > 1:
            (layer,) = store.layers(index)
            owner, _, stack = layer.name.rpartition(".")
            experts = model.get_submodule(owner)
            expected = join(getattr(experts, stack), joined=group.joined, transposed=experts.is_transposed)
            assert torch.equal(layer.weight, expected)
            assert layer.weight.shape == (group.outputs[0], group.inputs)
            assert layer.bias is None


def test_routers_stay() -> None:
    """Routers stay with the tenant, also if they are linears."""
    config = small("afmoe", num_dense_layers=0)
    config.architectures = ["AfmoeForCausalLM"]
    members = {member for group in traced(config).groups for member in group.members}
    assert any(member.endswith("experts.down_proj") for member in members)
    assert not any(".router" in member for member in members)


@pytest.mark.parametrize(
    "model", ["SwitchTransformersForConditionalGeneration", "DbrxForCausalLM", "Llama4ForCausalLM"]
)
def test_experts_of_other_classes_stay_as_a_whole(model: str) -> None:
    """From the row counts of a single expert's linear, a provider would see how rows are routed."""
    config = small(getattr(transformers, model).config_class)
    config.architectures = [model]
    groups = traced(config).groups
    assert groups
    assert all(group.experts == 1 for group in groups)
    assert not any("experts" in member for group in groups for member in group.members if "shared" not in member)


def test_a_missing_expert_is_an_error(tmp_path: Path) -> None:
    path = write("Mixtral", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    lost = next(name for name in tensors if "experts.3." in name)
    del tensors[lost]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="experts"):
        WeightStore(path, cache=tmp_path / "cache").manifest()


def test_experts_of_other_sizes_are_refused_before_they_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("Mixtral", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    large = next(name for name in tensors if "experts.3." in name)
    tensors[large] = torch.zeros(2 * len(tensors[large]), tensors[large].shape[1])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(MergeModulelist, "convert", None)
    with pytest.raises(CheckpointError, match="more than config"):
        WeightStore(path, cache=tmp_path / "cache").manifest()
