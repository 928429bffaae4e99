"""A plug-in for vLLM: the providers of a federation multiply the frozen linears of a model.

This is an example for users of vLLM, which supports only LoRA and shows no privacy ledger; this project's own endpoint
is `symbiosis-priv tenant serve`. To try the example, in an environment with vLLM and symbiosis-priv:

    pip install examples/vllm_plugin
    export SYMBIOSIS_PRIV_FEDERATION=federation.toml SYMBIOSIS_PRIV_MODEL=path/to/checkpoint
    vllm serve path/to/checkpoint --quantization symbiosis_priv --enforce-eager --enable-lora

vLLM's fused linears (`qkv_proj`, `gate_up_proj`) are the layer groups of a federation, so a step sends one request per
group. Rows are masked with pads, and products are verified and include the checkpoint's biases. The weights of these
linears are not loaded. At its start vLLM runs a pass of `--max-num-batched-tokens` rows, which is sent to providers
too.

This plug-in was written from vLLM's source: `layers/linear.py` at commit 0036d38e and `quantization/base_config.py` at
commit 026bb17c of vllm-project/vllm, both of 2026. The plug-in was not run with vLLM, which needs other versions of
transformers than this project's tests. `tests/examples/test_vllm.py` runs the plug-in with stand-ins for vLLM's
classes.
"""

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from symbiosis_priv.arithmetic.ring import FORWARD
from tenant import RemoteConfig
from tenant.masking.backend import Backend
from tenant.model.connect import open_backend

NAME = "symbiosis_priv"


@cache
def backend() -> Backend:
    """Open the session of this process. The environment names the federation, because a checkpoint must not choose
    it."""
    remote = RemoteConfig(federation=os.environ["SYMBIOSIS_PRIV_FEDERATION"], masking="pad")
    return open_backend(remote, os.environ["SYMBIOSIS_PRIV_MODEL"])


class SplitConfig(QuantizationConfig):  # type: ignore[misc]  # vLLM is not installed
    """Chooses the method of each linear. vLLM sends this object to its worker process, which opens the session."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SplitConfig":
        raise ValueError(f"the checkpoint's config.json has a quantization_config of {NAME}; delete that entry")

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> LinearMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        parent, _, leaf = prefix.rpartition(".")
        members = [f"{parent}.{part}" for part in self.packed_modules_mapping.get(leaf, [leaf])]
        groups = {tuple(facts.entry.members): index for index, facts in enumerate(backend().facts)}
        index = groups.get(tuple(members))
        return UnquantizedLinearMethod() if index is None else SplitLinear(index)


class SplitLinear(LinearMethodBase):  # type: ignore[misc]
    """One layer group."""

    def __init__(self, index: int) -> None:
        self._index = index

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        entry = backend().facts[self._index].entry
        if (input_size_per_partition, list(output_partition_sizes)) != (entry.inputs, list(entry.outputs)):
            raise ValueError(
                f"{', '.join(entry.members)}: run vLLM without tensor parallelism, on the federation's model"
            )
        if layer.skip_bias_add:
            raise ValueError(
                f"{', '.join(entry.members)}: this model adds biases itself, and the product includes them"
            )
        weight = Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
        weight.weight_loader = lambda *_, **__: None  # type: ignore[attr-defined]  # the providers have the weight
        layer.register_parameter("weight", weight)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        width = sum(backend().facts[self._index].entry.outputs)
        product = torch.empty((len(rows), width), dtype=x.dtype, device=x.device)
        backend().multiply(self._index, FORWARD, [rows], [product])
        return product.view(*x.shape[:-1], width)


def register() -> None:
    """Register the plug-in. vLLM calls this function in each of its processes, perhaps more than once."""
    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(SplitConfig)
