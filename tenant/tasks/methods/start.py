"""Gives PEFT's methods the base weight of an offloaded layer while they initialise an adapter.

DeLoRA takes the norms of the columns at its start and TinyLoRA factorises the weight. Neither needs the weight again.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from peft import PeftType
from peft.tuners.delora import DeloraModel
from peft.tuners.glora import GloraModel
from peft.tuners.tinylora import TinyLoraModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn

from symbiosis_priv.errors import UnsupportedMethodError
from tenant.model.remote_linear import RemoteLayer
from tenant.tasks.methods.registration import replace


@contextmanager
def weight_at_hand(layer: RemoteLayer) -> Iterator[None]:
    """Context manager: put the base weight into `layer.weight`. Changes to the weight have no effect.

    Raises:
        UnsupportedMethodError: there is no full checkpoint on the tenant's disk.
        CheckpointError: the checkpoint is not that of the federation.
    """
    absent = layer._parameters["weight"]
    # not by attribute: PEFT may have replaced `register_parameter` to make its own parameters on the meta device
    layer._parameters["weight"] = nn.Parameter(layer.base_weight().clone(), requires_grad=False)
    try:
        yield
    finally:
        layer._parameters["weight"] = absent


def remote_layer(module: nn.Module) -> RemoteLayer | None:
    """Return the module if it is an offloaded layer, or the offloaded layer inside a PEFT layer; else None."""
    base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    return base if isinstance(base, RemoteLayer) else None


def base_weight(module: nn.Module) -> Tensor:
    """Return the weight `[o, d]` that a linear multiplies by: its parameter, or an offloaded layer's rounded weight.
    Raises what `weight_at_hand` raises."""
    base: Any = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    weight: Tensor = base.base_weight(rounded=True) if isinstance(base, RemoteLayer) else base.weight.detach()
    return weight if isinstance(base, nn.Linear) else weight.t()


class OnOffloadedLayers(BaseTuner):
    """A mixin for PEFT's tuners: makes the base weight available while they make the adapter of an offloaded layer."""

    def starts_from_weight(self, config: Any) -> bool:
        """Returns True if a configuration needs the base weight."""
        return True

    def started(self, layer: RemoteLayer, module: Any, adapter: str, config: Any) -> None:
        """Adapt PEFT's finished module. `layer.weight` is the base weight, which PEFT may have changed."""

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
        config, adapter, target, name, parent = args[:5]
        layer = remote_layer(target)
        if layer is None:
            super()._create_and_replace(*args, **kwargs)  # type: ignore[safe-super]
            return
        with weight_at_hand(layer) if self.starts_from_weight(config) else nullcontext():
            super()._create_and_replace(*args, **kwargs)  # type: ignore[safe-super]
            self.started(layer, getattr(parent, name), adapter, config)


class RemoteDelora(OnOffloadedLayers, DeloraModel):
    """DeLoRA on offloaded layers too."""


class RemoteTinyLora(OnOffloadedLayers, TinyLoraModel):
    """TinyLoRA on offloaded layers too."""


class RefusedGlora(GloraModel):
    """GLoRA, which multiplies by the weight in every step: refused on offloaded layers."""

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
        if (layer := remote_layer(args[2])) is not None:
            raise UnsupportedMethodError(type(layer.weight).refusal("PEFT's GLoRA"))
        super()._create_and_replace(*args, **kwargs)


replace(PeftType.GLORA, RefusedGlora)
replace(PeftType.DELORA, RemoteDelora)
replace(PeftType.TINYLORA, RemoteTinyLora)
