"""Methods that add to a linear's output and need no base weight: bottleneck adapters and BitFit.

Bottleneck adapters compute `y + up(activation(down(y)))` on the output `y`. Houlsby et al. 2019 (arXiv:1902.00751)
adapt the outputs of attention and of the MLP (`target_modules=["o_proj", "down_proj"]`), Pfeiffer et al. 2020
(arXiv:2005.00247) only those of the MLP.

BitFit (Ben Zaken et al. 2022, arXiv:2106.10199) trains the biases of linears and layer norms. An adapter holds a vector
that is added to each bias, so several adapters share one model. PEFT's `LoraConfig(bias="all")`, which trains the
biases in place, works on split models as well.
"""

from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.errors import ConfigError, UnsupportedMethodError
from tenant.tasks.methods.layer import MethodConfig, MethodLayer, MethodTuner, adapted, add

_ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}


@dataclass
class BottleneckConfig(MethodConfig):
    """Configuration of bottleneck adapters.

    Args:
        activation: "gelu", "relu", "silu" or "tanh".
        init_weights: True initialises the adapter to zero output; False initialises it at random, for tests.

    Raises:
        ConfigError: a value is out of range.
    """

    method = "BOTTLENECK"

    bottleneck_dim: int = 64
    activation: str = "gelu"
    init_weights: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation not in _ACTIVATIONS:
            raise ConfigError(f"activation = {self.activation!r} is unknown; choose one of {', '.join(_ACTIVATIONS)}")
        if not self.bottleneck_dim >= 1:
            raise ConfigError(f"bottleneck_dim = {self.bottleneck_dim} is below 1")


class BottleneckLayer(MethodLayer):
    """A linear with bottleneck adapters on its output."""

    adapter_layer_names = ("bottleneck_down", "bottleneck_up")
    other_param_names = ("activation",)

    def make_containers(self) -> None:
        self.bottleneck_down = nn.ModuleDict()
        self.bottleneck_up = nn.ModuleDict()
        self.activation: dict[str, nn.Module] = {}

    def make(self, adapter: str, config: BottleneckConfig) -> None:
        _, width = self.widths
        self.bottleneck_down[adapter] = nn.Linear(width, config.bottleneck_dim)
        self.bottleneck_up[adapter] = up = nn.Linear(config.bottleneck_dim, width)
        self.activation[adapter] = _ACTIVATIONS[config.activation]()
        if config.init_weights:
            nn.init.zeros_(up.weight)
            nn.init.zeros_(up.bias)

    def change(self, adapter: str, x: Tensor, y: Tensor) -> Tensor | None:
        if adapter not in self.bottleneck_down:
            return None
        down: Any = self.bottleneck_down[adapter]
        added: Tensor = self.bottleneck_up[adapter](self.activation[adapter](down(y.to(down.weight.dtype))))
        return added


class BottleneckTuner(MethodTuner):
    prefix = "bottleneck_"
    tuner_layer_cls = BottleneckLayer


add("bottleneck", config=BottleneckConfig, tuner=BottleneckTuner)


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
            peft_config.target_modules = set()
            inside: tuple[str, ...] = ()  # modules of other adapters
            for name, module in self.model.named_modules():
                if name.startswith(inside) and inside:
                    continue
                if isinstance(module, BaseTunerLayer):
                    inside = (*inside, f"{name}.")
                if self.fits(adapted(module)):
                    peft_config.target_modules.add(name)
        if not peft_config.target_modules:
            raise UnsupportedMethodError(
                f"{type(self.model).__name__} has no bias that BitFit can train; use LoRA with lora_bias=True"
            )
        return peft_config

    @staticmethod
    def fits(module: nn.Module) -> bool:
        return isinstance(module, nn.Linear | Conv1D | nn.LayerNorm) and module.bias is not None


add("bitfit", config=BitFitConfig, tuner=BitFitTuner)
