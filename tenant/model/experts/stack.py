"""The parameter that replaces an offloaded expert stack, and LoRA on it.

PEFT adapts a stack by `target_parameters`: during a forward pass it replaces the parameter by `W + s * lhs @ rhs`
(`torch.baddbmm`). An offloaded stack has no W. For that operation it returns a stack that keeps the factors, and the
forward pass applies the factors to rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from symbiosis_priv.checkpoints.discovery.linears import called
from tenant.model import torch_compile
from tenant.model.offloaded import OffloadedWeight, describe_reader
from tenant.model.remote_linear import LayerGroup


@dataclass(frozen=True)
class Factors:
    """`scaling * lhs @ rhs`, which PEFT adds to a stack: `[experts, out, r]` and `[experts, r, in]`, as stored."""

    lhs: Tensor
    rhs: Tensor
    scaling: float

    def product(self, rows: Tensor, experts: Tensor, *, transposed: bool) -> Tensor:
        """Multiply each row by its own expert's factors.

        Args:
            rows: float `[s, in]`.
            experts: int64 `[s]`.
            transposed: True if the stack is `[experts, in, out]`.

        Returns:
            float `[s, out]`, in the rows' dtype.
        """
        first, second = (self.lhs, self.rhs) if transposed else (self.rhs.mT, self.lhs.mT)
        first, second = first.to(rows.dtype), second.to(rows.dtype)
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=len(first)).tolist()
        segments = rows[order].split(counts)
        products = [segment @ first[k] @ second[k] for k, segment in enumerate(segments) if counts[k]]
        return torch.cat(products)[order.argsort()] * self.scaling if products else rows.new_zeros(0, second.shape[-1])


class OffloadedStack(OffloadedWeight):
    """The offloaded matrices of all experts of a layer for one product. `factors` are the matrices that LoRA adds
    during a forward pass."""

    group: LayerGroup
    factors: tuple[Factors, ...] = ()

    @classmethod
    def of_group(cls, group: LayerGroup, shape: Sequence[int]) -> Self:
        """Make the parameter of a layer group."""
        stack = cls(shape)
        stack.group = group
        return stack

    def product(self, x: Tensor) -> Tensor:
        """Multiply by the whole stack, without LoRA: float `[t, d]` to float `[t, o]`."""
        y: Tensor = torch_compile.output(x, self.group.handle, 0)
        return y

    def like(self, nothing: Tensor) -> Self:
        twin = super().like(nothing)
        twin.group, twin.factors = self.group, self.factors
        return twin

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        match called(func), args:
            case "baddbmm", (OffloadedStack() as stack, lhs, rhs):
                adapted: Any = stack.clone()
                adapted.factors = (*stack.factors, Factors(lhs, rhs, (kwargs or {})["alpha"]))
                return adapted
            # when a parametrization is registered or a state is loaded
            case "set_" | "copy_", (stack, source) if stack is source:
                return stack
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def _no_reading(cls) -> str:
        who, advice = describe_reader()
        advice = advice or (
            "Adapt experts with LoraConfig(target_parameters=...) and one active adapter, "
            "or keep the experts here with RemoteConfig(experts='local')"
        )
        return f"{who} needs the experts' weights, which stay at the providers. {advice}"
