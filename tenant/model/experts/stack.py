"""Offloaded stacks of experts: their parameter, the rows that are sent to them, and the forward pass around them.

PEFT adapts a stack by `target_parameters`: during a forward pass it replaces the parameter by `W + s * lhs @ rhs`
(`torch.baddbmm`). An offloaded stack has no W. For that operation it returns a stack that keeps the factors, and the
forward pass applies the factors to rows.

A `Dispatch` sends rows to their experts; there is one class per mode. Notation: t tokens, k experts per token, e
experts in all, s = t k pairs of token and expert. `forward` implements transformers' experts interface. The routing
weights are folded into the rows before the second product, because the sum over a token's experts is then part of the
product in mode "all".
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.discovery.linears import called, stacks_in
from tenant.model.offloaded import OffloadedWeight, describe_reader
from tenant.model.remote_linear import LayerGroup, group_output, output_dtype
from tenant.options import Experts


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

    def product(self, x: Tensor) -> Tensor:
        """Multiply by the whole stack, without LoRA: float `[t, d]` to float `[t, o]`."""
        y: Tensor = group_output(x, self.group.handle, 0)
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


class Dispatch(ABC):
    """The routes of one forward pass: `index`, int64 `[t, k]`, holds the experts of each token. `bucket`: rows for
    single experts are sent in multiples of it, because the session's bucket would not change their largest count."""

    def __init__(self, index: Tensor, *, experts: int, bucket: int = 1) -> None:
        self.index, self.experts = index, experts

    @abstractmethod
    def spread(self, stack: OffloadedStack, x: Tensor) -> Tensor:
        """Multiply each token by the matrices of its experts: float `[t, d]` to `[s, w]`."""

    @abstractmethod
    def gather(self, stack: OffloadedStack, rows: Tensor) -> Tensor:
        """Multiply each row by its expert's matrix, and sum over each token's experts: float `[s, w]` to `[t, d]`."""


class Everywhere(Dispatch):
    """Mode "all": every token goes to every expert, with zeros where an expert does not take part."""

    def spread(self, stack: OffloadedStack, x: Tensor) -> Tensor:
        every = stack.product(x).unflatten(1, (self.experts, -1))
        rows: Tensor = every.take_along_dim(self.index[..., None], dim=1).flatten(0, 1)
        return rows

    def gather(self, stack: OffloadedStack, rows: Tensor) -> Tensor:
        rows = rows.unflatten(0, self.index.shape)
        every = rows.new_zeros(rows.shape[0], self.experts, rows.shape[2])
        return stack.product(every.scatter_add(1, self.index[..., None].expand_as(rows), rows).flatten(1))


class Flat(Dispatch):
    """Mode "flat": rows sorted by expert. Each expert gets as many as the one with the most tokens, filled up with rows
    of zeros. Masked, these look like other rows, so providers see the largest count but not its expert. `counts`: the
    number of rows that are sent for each expert. `places`: int64 `[s]`. For each pair of token and expert, the index of
    its row among the rows that are sent."""

    def __init__(self, index: Tensor, *, experts: int, bucket: int = 1) -> None:
        super().__init__(index, experts=experts)
        chosen = index.flatten()
        counts = chosen.bincount(minlength=experts)
        order = chosen.argsort(stable=True)
        most = -(-int(counts.max()) // bucket) * bucket
        shift = torch.arange(experts, dtype=torch.long, device=index.device) * most - counts.cumsum(0) + counts
        places = torch.arange(len(chosen), dtype=torch.long, device=index.device) + shift[chosen[order]]
        self.places = torch.empty_like(order).index_copy_(0, order, places)
        self.counts: Counts = (most,) * experts

    def spread(self, stack: OffloadedStack, x: Tensor) -> Tensor:
        return self._product(stack, x.repeat_interleave(self.index.shape[1], dim=0))

    def gather(self, stack: OffloadedStack, rows: Tensor) -> Tensor:
        product: Tensor = self._product(stack, rows).unflatten(0, self.index.shape)
        return product.sum(1)

    def _product(self, stack: OffloadedStack, rows: Tensor) -> Tensor:
        sent = rows.new_zeros(sum(self.counts), rows.shape[1]).index_copy(0, self.places, rows)
        product: Tensor = _ProductByExpert.apply(  # type: ignore[no-untyped-call]
            sent, stack.group, self.counts, FORWARD, output_dtype(sent), False
        )
        return product[self.places]


class _ProductByExpert(torch.autograd.Function):
    """Multiplies rows that are sorted by expert, each by its own expert's matrix. Its derivative is the product of
    gradients in the other direction, since a stack has no bias; and so is that one's."""

    @staticmethod
    def forward(
        rows: Tensor, group: LayerGroup, counts: Counts, direction: Direction, dtype: torch.dtype, gradients: bool
    ) -> Tensor:
        facts = group.backend.facts[group.index].for_rows(counts)
        assert facts.bias is None
        product = torch.empty(rows.shape[0], facts.outputs(direction), dtype=dtype, device=rows.device)
        multiply = group.multiply_gradients if gradients else group.multiply
        multiply(direction, [rows], [product], counts=counts)
        return product

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, ctx.group, ctx.counts, direction, *_ = inputs
        ctx.other, ctx.dtype = BACKWARD if direction == FORWARD else FORWARD, rows.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = grad, ctx.group, ctx.counts, ctx.other, ctx.dtype, True
        return _ProductByExpert.apply(*back), None, None, None, None, None  # type: ignore[no-untyped-call]


def forward(
    kind: type[Dispatch], module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the experts' output.

    Args:
        hidden_states: float `[t, h]`.
        top_k_index: int64 `[t, k]`; an index beyond the last expert means no expert.
        top_k_weights: float `[t, k]`.

    Returns:
        float `[t, h]`, in the dtype of `hidden_states`.
    """
    up_name, down_name = stacks_in(module)
    up, down = getattr(module, up_name), getattr(module, down_name)
    if not isinstance(up, OffloadedStack):  # only experts elsewhere in the model are offloaded
        plain: Tensor = type(module).forward.__wrapped__(module, hidden_states, top_k_index, top_k_weights)
        return plain
    weights = top_k_weights.masked_fill(top_k_index >= module.num_experts, 0)
    index = top_k_index.clamp(max=module.num_experts - 1)
    route, experts = kind(index, experts=module.num_experts, bucket=up.group.row_bucket), index.flatten()

    hidden = route.spread(up, hidden_states)
    for factors in up.factors:
        rows = hidden_states.repeat_interleave(index.shape[1], dim=0)
        hidden = hidden + factors.product(rows, experts, transposed=module.is_transposed)
    if module.has_bias:
        hidden = hidden + getattr(module, f"{up_name}_bias")[experts]
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    hidden = hidden * weights.reshape(-1, 1)

    output = route.gather(down, hidden)
    for factors in down.factors:
        more = factors.product(hidden, experts, transposed=module.is_transposed)
        output = output + more.unflatten(0, index.shape).sum(1)
    if module.has_bias:
        output = output + (getattr(module, f"{down_name}_bias")[index] * weights[..., None]).sum(1)
    return output.to(hidden_states.dtype)


ROUTES: dict[Experts, type[Dispatch]] = {"all": Everywhere, "flat": Flat}
"""The modes in which experts are offloaded."""


def implementation(mode: Experts) -> str:
    """Return the name under which the forward pass of a mode is registered with transformers."""
    return f"symbiosis-priv-{mode}"


for mode, kind in ROUTES.items():
    # Dynamo cannot trace parameters without values, so the experts of a compiled model run in eager mode
    ALL_EXPERTS_FUNCTIONS.register(implementation(mode), torch.compiler.disable(partial(forward, kind)))
