"""The forward pass of experts whose stacks are offloaded, as an implementation of transformers' experts interface.

The routing weights are folded into the rows before the second product, because the sum over a token's experts is then
part of the product. Notation: t tokens, k experts per token, e experts in all, s = t k pairs of token and expert.
"""

from typing import Any

from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from symbiosis_priv.checkpoints.discovery.experts import stacks_in
from tenant.model.experts.stack import OffloadedStack

IMPLEMENTATION = "symbiosis-priv"
"""The name under which transformers knows this implementation."""


def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' output.

    Args:
        module: an expert module of transformers.
        hidden_states: float `[t, h]`.
        top_k_index: int64 `[t, k]`; an index beyond the last expert is no expert.
        top_k_weights: float `[t, k]`.

    Returns:
        float `[t, h]`, in the dtype of `hidden_states`.
    """
    up_name, down_name = stacks_in(module)
    up, down = getattr(module, up_name), getattr(module, down_name)
    if not isinstance(up, OffloadedStack):  # the experts of another part of the model are offloaded
        plain: Tensor = type(module).forward.__wrapped__(module, hidden_states, top_k_index, top_k_weights)
        return plain
    weights = top_k_weights.masked_fill(top_k_index >= module.num_experts, 0)
    index = top_k_index.clamp(max=module.num_experts - 1)
    tokens, chosen = index.shape
    experts = index.flatten()

    hidden = _of_each(up.product(hidden_states), index, experts=module.num_experts)
    for factors in up.factors:
        rows = hidden_states.repeat_interleave(chosen, dim=0)
        hidden = hidden + factors.product(rows, experts, transposed=module.is_transposed)
    if module.has_bias:
        hidden = hidden + getattr(module, f"{up_name}_bias")[experts]
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    hidden = hidden * weights.reshape(-1, 1)

    output: Tensor = down.product(_joined(hidden, index, experts=module.num_experts))
    for factors in down.factors:
        more = factors.product(hidden, experts, transposed=module.is_transposed)
        output = output + more.view(tokens, chosen, -1).sum(1)
    if module.has_bias:
        output = output + (getattr(module, f"{down_name}_bias")[index] * weights[..., None]).sum(1)
    return output.to(hidden_states.dtype)


def _of_each(products: Tensor, index: Tensor, *, experts: int) -> Tensor:
    """The products of each token with its own experts, `[s, w]`, from those with all experts, `[t, e w]`."""
    every = products.unflatten(1, (experts, -1))
    chosen: Tensor = every.take_along_dim(index[..., None], dim=1).flatten(0, 1)
    return chosen


def _joined(rows: Tensor, index: Tensor, *, experts: int) -> Tensor:
    """The rows `[s, w]` of each token's experts side by side, `[t, e w]`; zeros where an expert is not chosen."""
    rows = rows.unflatten(0, index.shape)
    every = rows.new_zeros(rows.shape[0], experts, rows.shape[2])
    joined: Tensor = every.scatter_add(1, index[..., None].expand_as(rows), rows).flatten(1)
    return joined


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, forward)
