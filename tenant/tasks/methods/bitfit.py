"""BitFit (Ben Zaken et al. 2022, arXiv:2106.10199): trains the biases of linears and layer norms.

An adapter holds a vector that is added to each bias, so several adapters share one model. PEFT's
`LoraConfig(bias="all")`, which trains the biases in place, works on split models as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.errors import UnsupportedMethodError
from tenant.tasks.methods.layer import MethodConfig, MethodLayer, MethodTuner
from tenant.tasks.methods.registration import add


@dataclass
class BitFitConfig(MethodConfig):
    """Configuration of BitFit. Without `target_modules`, all biases of linears and layer norms are trained."""

    method = "BITFIT"


class BitFitLayer(MethodLayer):
    """A module with vectors that are added to its bias."""

    adapter_layer_names = ("bitfit_bias",)

    def make_containers(self) -> None:
        self.bitfit_bias = nn.ParameterDict()

    def make(self, adapter: str, config: BitFitConfig) -> None:
        base: Any = self.get_base_layer()
        self.bitfit_bias[adapter] = nn.Parameter(torch.zeros_like(base.bias))

    def change(self, adapter: str, x: Tensor, y: Tensor) -> Tensor | None:
        bias: Tensor | None = self.bitfit_bias.get(adapter)
        return bias


class BitFitTuner(MethodTuner):
    prefix = "bitfit_"
    tuner_layer_cls = BitFitLayer

    def _prepare_adapter_config(self, peft_config: Any, model_config: Any) -> Any:
        if peft_config.target_modules is None:
            peft_config.target_modules = set(self._biased())
        if not peft_config.target_modules:
            raise UnsupportedMethodError(
                f"{type(self.model).__name__} has no bias that BitFit can train; use LoRA with lora_bias=True"
            )
        return peft_config

    def _biased(self) -> Iterator[str]:
        """Yield the names of the model's modules with a bias, without modules of other adapters."""
        inside: tuple[str, ...] = ()
        for name, module in self.model.named_modules():
            if name.startswith(inside) and inside:
                continue
            if isinstance(module, BaseTunerLayer):
                inside = (*inside, f"{name}.")
                module = module.get_base_layer()
            if self.fits(module):
                yield name

    @staticmethod
    def fits(module: nn.Module) -> bool:
        return isinstance(module, nn.Linear | Conv1D | nn.LayerNorm) and module.bias is not None


add("bitfit", config=BitFitConfig, tuner=BitFitTuner)
