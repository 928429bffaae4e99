"""Bottleneck adapters: `y + up(activation(down(y)))` on the output `y` of a linear.

Houlsby et al. 2019 (arXiv:1902.00751) adapt the outputs of attention and of the MLP (`target_modules=["o_proj",
"down_proj"]`), Pfeiffer et al. 2020 (arXiv:2005.00247) only those of the MLP. The method needs no base weight.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from symbiosis_priv.errors import ConfigError
from tenant.tasks.methods.layer import MethodConfig, MethodLayer, MethodTuner
from tenant.tasks.methods.registration import add

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
