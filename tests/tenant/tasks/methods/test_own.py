"""The four methods of this package: the same losses and logits split and plain, trained, saved and loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError, ConfigError, UnsupportedMethodError
from tenant import BitFitConfig, BottleneckConfig, DiffPruningConfig, RemoteConfig
from tenant.model.connect import BaseWeights
from tenant.model.remote_linear import RemoteLayer
from tenant.preparation.own_tensors import write_slim
from tests.adapters import peft_config
from tests.cases import cases, table
from tests.tenant.tasks.methods.conftest import load, logits, trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, about saving without a hub

METHODS = table(__file__, "methods")


@pytest.mark.parametrize("name", ["bottleneck", "bitfit", "diff pruning"])
def test_a_new_adapter_changes_no_bit(name: str, exact_gpt2: Path) -> None:
    base = load(exact_gpt2, split=True)
    expected = logits(base)
    model: Any = get_peft_model(base, peft_config(**METHODS[name]))
    assert torch.equal(logits(model), expected)


def test_bitfit_trains_every_bias_and_nothing_else(exact_gpt2: Path) -> None:
    base = load(exact_gpt2, split=True)
    biases = {name.removesuffix(".bias") for name, _ in base.named_parameters() if name.endswith(".bias")}
    model: Any = get_peft_model(base, BitFitConfig())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"base_model.model.{name}.bitfit_bias.default" for name in biases}


def test_bitfit_needs_a_bias(exact_llama: Path) -> None:
    with pytest.raises(UnsupportedMethodError, match="lora_bias"):
        get_peft_model(load(exact_llama, split=True), BitFitConfig())


def test_two_adapters_are_told_apart(exact_gpt2: Path, tmp_path: Path) -> None:
    """Each alone, one after the other, and neither."""
    expected = {}
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        config = BottleneckConfig(bottleneck_dim=4 + seed, init_weights=False, target_modules=["c_proj"])
        model: Any = get_peft_model(load(exact_gpt2, split=True), config)
        expected[name] = logits(model)
        model.save_pretrained(str(tmp_path / name))
    base = load(exact_gpt2, split=True)
    without = logits(base)
    both: Any = PeftModel.from_pretrained(base, str(tmp_path / "a"), adapter_name="a")
    both.load_adapter(str(tmp_path / "b"), adapter_name="b")
    for name in ("b", "a", "b"):
        both.set_adapter(name)
        assert torch.equal(logits(both), expected[name])
    with both.disable_adapter():
        assert torch.equal(logits(both), without)
    both.delete_adapter("b")
    assert torch.equal(logits(both), expected["a"])


def test_a_pruned_change_has_the_stated_density_and_trains_further(exact_llama: Path, tmp_path: Path) -> None:
    config = DiffPruningConfig(density=0.03, target_modules=["down_proj"])
    first = trained(load(exact_llama, split=True), config)
    first.model.save_pretrained(str(tmp_path))
    model: Any = PeftModel.from_pretrained(load(exact_llama, split=True), str(tmp_path), is_trainable=True)
    assert torch.equal(logits(model), first.logits)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {len(parameter) for parameter in parameters} == {round(0.03 * 64 * 112)}
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    assert all(bool(parameter.grad.any()) for parameter in parameters)


def test_masks_and_starts_from_the_weight_need_a_full_checkpoint(exact_llama: Path, tmp_path: Path) -> None:
    """It is said before the first step."""
    store = WeightStore(exact_llama)
    write_slim(store, store.manifest(), tmp_path / "slim")
    slim = BaseWeights(RemoteConfig(masking="simulate"), tmp_path / "slim")
    with pytest.raises(UnsupportedMethodError, match="checkpoint='FULL_CHECKPOINT'"):
        slim.read(store.manifest().groups[0], 0)
    model = load(exact_llama, split=True)
    for module in model.modules():
        if isinstance(module, RemoteLayer):
            module.group.weights = slim
    for config in (
        peft_config(**METHODS["maskbert"]),
        LoraConfig(init_lora_weights="pissa", target_modules=["q_proj"]),
    ):
        with pytest.raises(UnsupportedMethodError, match="checkpoint='FULL_CHECKPOINT'"):
            get_peft_model(model, config)


def test_other_weights_than_the_providers_are_noticed(exact_llama: Path, llama: Path) -> None:
    entry = WeightStore(exact_llama).manifest().groups[0]
    with pytest.raises(CheckpointError, match="not those that providers serve"):
        BaseWeights(RemoteConfig(masking="simulate", weight_bits=8), llama).read(entry, 0)


@cases(__file__, "refused")
def test_values_out_of_range_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        peft_config(**config)


@pytest.mark.parametrize("name", ["bottleneck", "maskbert"])
def test_merging_is_refused(name: str, exact_llama: Path) -> None:
    model: Any = get_peft_model(load(exact_llama, split=True), peft_config(**METHODS[name]))
    with pytest.raises(UnsupportedMethodError, match="merg"):
        model.merge_and_unload()
