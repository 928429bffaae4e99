"""The forward pass of experts whose stacks are offloaded, as an implementation of transformers' experts interface.

The routing weights are folded into the rows before the second product, because the sum over a token's experts is then
part of the product in mode "all". `dispatch` has the notation.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from symbiosis_priv.checkpoints.discovery.linears import stacks_in
from tenant.model.experts.dispatch import AsRouted, Dispatch, Everywhere, Flat
from tenant.model.experts.stack import OffloadedStack
from tenant.options import Experts


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
    route, experts = kind(index, experts=module.num_experts), index.flatten()

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


ROUTES: dict[Experts, type[Dispatch]] = {"all": Everywhere, "flat": Flat, "counts": AsRouted}
"""The modes in which experts are offloaded."""


def implementation(mode: Experts) -> str:
    """Return the name under which the forward pass of a mode is registered with transformers."""
    return f"symbiosis-priv-{mode}"


for mode, kind in ROUTES.items():
    # Dynamo cannot trace parameters without values, so the experts of a compiled model run in eager mode
    ALL_EXPERTS_FUNCTIONS.register(implementation(mode), torch.compiler.disable(partial(forward, kind)))
