"""The plug-in for vLLM, with stand-ins for vLLM's classes: vLLM needs other versions of torch and transformers."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from symbiosis_priv.harness.base_model import Pretraining, make_base_model
from tenant import RemoteConfig
from tenant.model.connect import open_backend
from tenant.model.loading import load_language_model

PLUGIN = Path(__file__).parents[2] / "examples" / "vllm_plugin" / "symbiosis_priv_vllm.py"
LAYERS = "vllm.model_executor.layers"


class Linear(torch.nn.Module):
    """Stands for vLLM's `LinearBase`: asks the configuration for its method, as the constructors of vLLM do."""

    def __init__(
        self, inputs: int, outputs: list[int], config: Any, prefix: str, *, skip_bias_add: bool = False
    ) -> None:
        super().__init__()
        self.skip_bias_add = skip_bias_add
        self.quant_method = config.get_quant_method(self, prefix=prefix)
        sizes = inputs, outputs, inputs, sum(outputs), torch.float32
        self.quant_method.create_weights(self, *sizes, weight_loader=None)


class Config:
    """Stands for vLLM's `QuantizationConfig`. vLLM sets the mapping from the model's class."""

    def __init__(self) -> None:
        self.packed_modules_mapping = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }


@pytest.fixture
def registered() -> dict[str, Any]:
    return {}


@pytest.fixture
def plugin(registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plug-in's module, imported beside the stand-ins."""
    method = type("LinearMethodBase", (), {})
    quantization = {
        "QUANTIZATION_METHODS": registered,
        "register_quantization_config": lambda name: lambda kind: registered.setdefault(name, kind),
    }
    contents: dict[str, dict[str, Any]] = {
        "linear": {
            "LinearBase": Linear,
            "LinearMethodBase": method,
            "UnquantizedLinearMethod": type("Plain", (method,), {}),
        },
        "quantization": quantization,
        "quantization.base_config": {"QuantizationConfig": Config},
    }
    for name in ("vllm", "vllm.model_executor", LAYERS):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, content in contents.items():
        module = ModuleType(f"{LAYERS}.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("symbiosis_priv_vllm", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_vllms_fused_linears_are_layer_groups(
    plugin: Any, registered: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Pretraining(steps=1, batch=1, window=8, sentences=100, vocab=300, width=32, blocks=1)
    model = make_base_model(tmp_path / "model", recipe=recipe)
    backend = open_backend(RemoteConfig(masking="simulate"), model)
    monkeypatch.setattr(plugin, "backend", lambda: backend)
    plugin.register()
    plugin.register()
    config = registered["symbiosis_priv"]()
    split = load_language_model(model, remote=RemoteConfig(masking="simulate"), dtype=torch.float32)
    block, x = split.model.layers[0], torch.randn(2, 3, 32)
    for fused, parts in {
        "self_attn.qkv_proj": "qkv",
        "self_attn.o_proj": "o",
        "mlp.gate_up_proj": ["gate", "up"],
    }.items():
        parent = block.get_submodule(fused.partition(".")[0])
        linears = [getattr(parent, f"{part}_proj") for part in parts]
        linear: Any = Linear(32, [one.out_features for one in linears], config, f"model.layers.0.{fused}")
        linear.weight.weight_loader(linear.weight, torch.ones(1), "q")
        assert linear.weight.numel() == 0
        with torch.no_grad():
            expected = torch.cat([one(x) for one in linears], -1)
        with torch.inference_mode():  # as vLLM runs a model
            assert torch.equal(linear.quant_method.apply(linear, x.clone()), expected)
    with pytest.raises(ValueError, match="biases"):
        Linear(32, [32], config, "model.layers.0.self_attn.o_proj", skip_bias_add=True)
    with pytest.raises(ValueError, match="parallelism"):
        Linear(32, [16], config, "model.layers.0.self_attn.o_proj")
    with pytest.raises(ValueError, match="delete"):
        type(config).from_config({"quant_method": "symbiosis_priv"})
    assert config.get_quant_method(torch.nn.Embedding(2, 2), "model.embed_tokens") is None
