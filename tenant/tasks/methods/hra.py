"""HRA (Yuan et al. 2024, arXiv:2405.17484): Householder reflections, `y = W H x`.

PEFT multiplies the weight by `H`. An offloaded layer gets the rotated rows `H x` instead. The product of r reflections
`I - 2 u u^T` is `I - U T U^T` with `T = (I/2 + the part of U^T U above its diagonal)^-1` (Joffrain et al. 2006,
"Accumulating Householder transformations, revisited"), so that rotating a row costs 2 r d multiplications. Siblings
(q/k/v) with different adapters have different inputs, so each needs its own request.
"""

from typing import Any

import torch
from peft import PeftType
from peft.tuners.hra import HRAModel
from peft.tuners.hra.layer import HRALinear
from torch import Tensor

from tenant.model.remote_linear import RemoteLayer
from tenant.tasks.methods.registration import replace
from tenant.tasks.methods.start import OnOffloadedLayers


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
        directions = _orthogonal(u)
        return x - 2 * (x @ directions) @ directions.t()
    u = u / u.norm(dim=0)
    upper = torch.triu(u.t() @ u, diagonal=1) + torch.eye(u.shape[1], dtype=u.dtype, device=u.device) / 2
    # H = I - U T U^T, so a row is x - ((x U) T^T) U^T; solving with `upper` on the right multiplies by T
    inner: Tensor = torch.linalg.solve_triangular(upper, (x @ u).reshape(-1, u.shape[1]).t(), upper=True).t()
    result: Tensor = x - (inner @ u.t()).view(x.shape)
    return result


def _orthogonal(u: Tensor) -> Tensor:
    """Orthogonalise columns by Gram-Schmidt, in PEFT's order."""
    columns: list[Tensor] = []
    for column in u.t():
        for other in columns:
            column = column - (other @ column) * other
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)


class RemoteHRA(OnOffloadedLayers, HRAModel):
    def starts_from_weight(self, config: Any) -> bool:
        return False

    def started(self, layer: RemoteLayer, module: Any, adapter: str, config: Any) -> None:
        module.__class__ = RemoteHRALinear  # a subclass that adds no attributes


replace(PeftType.HRA, RemoteHRA)
