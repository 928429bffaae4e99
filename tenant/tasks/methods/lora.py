"""LoRA that starts from the base weight: PiSSA, OLoRA, CorDA and MiCA; and DoRA.

PiSSA, OLoRA and CorDA move a low-rank part of the base weight into the adapter: PEFT subtracts `s B0 A0` from the
weight. An offloaded layer subtracts the product instead: `W x - s B0 A0 x + s B A x`. The saved folder is the same as
PEFT's. CorDA's `preprocess_corda` reads weights as well: call it inside `weights_at_hand(model)`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from peft import PeftType
from peft.tuners.lora import LoraModel
from torch import Tensor, nn
from torch.nn import functional

from tenant.model.adapter_limits import STARTS_FROM_WEIGHT
from tenant.model.remote_linear import RemoteLayer
from tenant.tasks.methods.dora import RemoteDora
from tenant.tasks.methods.registration import replace
from tenant.tasks.methods.start import OnOffloadedLayers, weight_at_hand

_MOVING = ("pissa", "olora", "corda")


class LowRank(nn.Module):
    """The frozen matrix `scaling * b @ a`, for a `[r, d]` and b `[o, r]`."""

    a: Tensor
    b: Tensor

    def __init__(self, a: Tensor, b: Tensor, scaling: float) -> None:
        super().__init__()
        self.register_buffer("a", a.detach().clone(), persistent=False)
        self.register_buffer("b", b.detach().clone(), persistent=False)
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x.to(self.a.dtype), self.a), self.b) * self.scaling

    def delta(self) -> Tensor:
        """Return the matrix `[o, d]`."""
        return self.scaling * self.b @ self.a


class RemoteLora(OnOffloadedLayers, LoraModel):
    """LoRA on offloaded layers, with the starts that need the base weight."""

    def starts_from_weight(self, config: Any) -> bool:
        return bool(config.use_dora) or str(config.init_lora_weights).lower().startswith(STARTS_FROM_WEIGHT)

    def started(self, layer: RemoteLayer, module: Any, adapter: str, config: Any) -> None:
        if str(config.init_lora_weights).lower().startswith(_MOVING):
            a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
            layer.moved = nn.ModuleList([*(layer.moved or ()), LowRank(a, b, module.scaling[adapter])])
        if config.use_dora:
            module.lora_magnitude_vector[adapter] = RemoteDora(module, adapter, layer)


@contextmanager
def weights_at_hand(model: nn.Module) -> Iterator[None]:
    """Context manager: put all base weights of a split model into its layers. Needs memory for the whole model.

    Raises:
        UnsupportedMethodError: there is no full checkpoint on the tenant's disk.
        CheckpointError: the checkpoint is not that of the federation.
    """
    with ExitStack() as at_hand:
        for module in list(model.modules()):
            if isinstance(module, RemoteLayer):
                at_hand.enter_context(weight_at_hand(module))
        yield


replace(PeftType.LORA, RemoteLora)
