"""PEFT's methods on offloaded layers: gives them the base weight while they initialise an adapter; and HRA, GLoRA.

DeLoRA takes the norms of the columns at its start and TinyLoRA factorises the weight. Neither needs the weight again.

HRA (Yuan et al. 2024, arXiv:2405.17484): Householder reflections, `y = W H x`. PEFT multiplies the weight by `H`. An
offloaded layer gets the rotated rows `H x` instead. The product of r reflections `I - 2 u u^T` is `I - U T U^T` with
`T = (I/2 + the part of U^T U above its diagonal)^-1` (Joffrain et al. 2006, "Accumulating Householder transformations,
revisited"), so that rotating a row costs 2 r d multiplications. Siblings (q/k/v) with different adapters have different
inputs, so each needs its own request.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftType
from peft.tuners.delora import DeloraModel
from peft.tuners.glora import GloraModel
from peft.tuners.hra import HRAModel
from peft.tuners.hra.layer import HRALinear
from peft.tuners.tinylora import TinyLoraModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn

from symbiosis_priv.errors import UnsupportedMethodError
from tenant.model.remote_linear import RemoteLayer
from tenant.tasks.methods.layer import use_instead


@contextmanager
def weight_at_hand(layer: RemoteLayer) -> Iterator[None]:
    """Context manager: put the base weight into `layer.weight`. Changes to the weight have no effect. Raises
    `UnsupportedMethodError` if there is no full checkpoint on the tenant's disk; `CheckpointError` if the checkpoint is
    not that of the federation."""
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
    if not isinstance(base, RemoteLayer) and hasattr(base, "original"):
        base = base.original()  # a task's stand-in for a linear of a whole model
    weight: Tensor = base.base_weight(rounded=True) if isinstance(base, RemoteLayer) else base.weight.detach()
    return weight if isinstance(base, nn.Linear) else weight.t()


class OnOffloadedLayers(BaseTuner):
    """A mixin for PEFT's tuners: makes the base weight available while they make the adapter of an offloaded layer.
    `linear` becomes the class of PEFT's finished module."""

    linear: type[nn.Module] | None = None

    def starts_from_weight(self, config: Any) -> bool:
        """Returns True if a configuration needs the base weight."""
        return True

    def started(self, layer: RemoteLayer, module: Any, adapter: str, config: Any) -> None:
        """Adapt PEFT's finished module. `layer.weight` is the base weight, which PEFT may have changed."""
        if self.linear is not None:
            module.__class__ = self.linear

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


use_instead(PeftType.GLORA, RefusedGlora)
use_instead(PeftType.DELORA, RemoteDelora)
use_instead(PeftType.TINYLORA, RemoteTinyLora)


class RemoteHRALinear(HRALinear):
    """PEFT's module around an offloaded layer: it rotates the input."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dtype = x.dtype
        if not (self.disable_adapters or self.merged):
            for adapter in reversed(self.active_adapters):
                if adapter in self.hra_u:
                    x = rotated(x.to(self.hra_u[adapter].dtype), self.hra_u[adapter], self.hra_apply_GS[adapter])
        result: Tensor = self.base_layer(x, *args, **kwargs)
        return result.to(dtype)


def rotated(x: Tensor, u: Tensor, gram_schmidt: bool) -> Tensor:
    """Return `H x` for rows x `[..., d]`: the reflections along the columns of u `[d, r]`, which need not be unit
    vectors. With `gram_schmidt`, the columns are made orthogonal first."""
    if gram_schmidt:
        columns: list[Tensor] = []
        for column in u.t():  # in PEFT's order
            for other in columns:
                column = column - (other @ column) * other
            columns.append(column / column.norm())
        directions = torch.stack(columns, dim=1)
        return x - 2 * (x @ directions) @ directions.t()
    u = u / u.norm(dim=0)
    upper = torch.triu(u.t() @ u, diagonal=1) + torch.eye(u.shape[1], dtype=u.dtype, device=u.device) / 2
    # H = I - U T U^T, so a row is x - ((x U) T^T) U^T; solving with `upper` on the right multiplies by T
    inner: Tensor = torch.linalg.solve_triangular(upper, (x @ u).reshape(-1, u.shape[1]).t(), upper=True).t()
    result: Tensor = x - (inner @ u.t()).view(x.shape)
    return result


class RemoteHRA(OnOffloadedLayers, HRAModel):
    linear = RemoteHRALinear

    def starts_from_weight(self, config: Any) -> bool:
        return False


use_instead(PeftType.HRA, RemoteHRA)
