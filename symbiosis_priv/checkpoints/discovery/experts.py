"""Finds the mixtures of experts in a model, and the expert stacks that can be offloaded.

The experts of a row depend on the row. A single expert is never a layer group of its own: the row counts of requests
would show a provider how rows are routed. Whole stacks are layer groups (`GroupSpec.experts`): a tenant can multiply
every row by all experts, or send `counts`. Only the classes that transformers calls through its experts interface
(`transformers.integrations.moe`) are offloaded: their routing, gate and sum are separate from their products. Routers
stay with the tenant. Other classes of experts (Llama 4, DBRX, JetMoe, NLLB-MoE, Switch Transformers, ...) stay with the
tenant as a whole.
"""

from torch import nn
from transformers import PreTrainedModel

from symbiosis_priv.checkpoints.layers import GroupSpec

_EXPERTS = "experts"
_ROUTERS = ("gate", "router")


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold the experts of a layer, by name."""
    return {name: module for name, module in model.named_modules() if name.rpartition(".")[2] == _EXPERTS}


def routed_modules(model: PreTrainedModel) -> set[str]:
    """The names of all modules inside experts and routers, which stay with the tenant."""
    routed = []
    for name in experts_of(model):
        layer = name.rpartition(".")[0]
        routed += [name, *(f"{layer}.{router}" for router in _ROUTERS)]
    return {
        name for name, _ in model.named_modules() if any(name == part or name.startswith(f"{part}.") for part in routed)
    }


def stacks_in(experts: nn.Module) -> tuple[str, str]:
    """The names of a module's two stacks: before the activation (gate and up, or up alone), and after it (down)."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def is_stacked(experts: nn.Module) -> bool:
    """Returns True if a module's two stacks can be offloaded: transformers calls it through its experts interface.

    A norm of each expert's output would need each expert's product, not their sum.
    """
    if not hasattr(experts, "is_transposed") or getattr(experts, "has_post_expert_norm", False):
        return False
    stacks = [getattr(experts, stack, None) for stack in stacks_in(experts)]
    return all(isinstance(stack, nn.Parameter) and stack.dim() == 3 for stack in stacks)


def stacks_of(name: str, experts: nn.Module) -> tuple[GroupSpec, GroupSpec]:
    """The layer groups of the two stacks of a module that `is_stacked`, in the order of their products."""
    up, down = stacks_in(experts)
    count, outputs, inputs = _shape(experts, up)
    _, last, hidden = _shape(experts, down)
    return (
        GroupSpec((f"{name}.{up}",), inputs, (count * outputs,), count, "outputs"),
        GroupSpec((f"{name}.{down}",), count * hidden, (last,), count, "inputs"),
    )


def _shape(experts: nn.Module, stack: str) -> tuple[int, int, int]:
    """(experts, outputs, inputs) of a stack."""
    count, first, second = getattr(experts, stack).shape
    return (count, second, first) if experts.is_transposed else (count, first, second)
