"""Finds the linears and the stacks of experts that can be offloaded.

A linear can be offloaded if the model uses its weight only through operations that read a tensor's metadata (shape,
dtype, device, ...) and none of its values (`is_metadata`): the placeholder for its weight supports no others.

The experts of a row depend on the row. A single expert is never a layer group of its own: the row counts of requests
would show a provider how rows are routed. Whole stacks are layer groups (`GroupSpec.experts`): a tenant can multiply
every row by all experts, or send `counts`. Only the classes that transformers calls through its experts interface
(`transformers.integrations.moe`) are offloaded: their routing, gate and sum are separate from their products. Routers
stay with the tenant. Other classes of experts (Llama 4, DBRX, NLLB-MoE, Switch Transformers, ...) stay with the
tenant as a whole.
"""

import copy
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.arithmetic.ring import Widths
from symbiosis_priv.checkpoints.layers import GroupSpec


def is_linear(module: nn.Module) -> bool:
    """Returns True if a module can be offloaded: its class is a linear, and it computes a linear's product."""
    if not isinstance(module, (nn.Linear, Conv1D)):
        return False
    return type(module).forward in (nn.Linear.forward, Conv1D.forward) or _is_product(module)


def _is_product(module: nn.Linear | Conv1D) -> bool:
    """Returns True if a subclass with its own `forward` computes `x @ W.T + b`; tried on a small instance."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, device="cpu", generator=generator)

    inputs, outputs = 5, 3
    weight, bias = random(outputs, inputs), random(outputs)
    small = copy.copy(module)
    if isinstance(small, nn.Linear):
        small.in_features, small.out_features = inputs, outputs
    else:
        small.nx, small.nf = inputs, outputs
    stored = weight if isinstance(small, nn.Linear) else weight.t()
    small.__dict__["_parameters"] = {"weight": stored, "bias": None if module.bias is None else bias}
    x = random(2, inputs)
    expected = nn.functional.linear(x, weight, None if module.bias is None else bias)
    for training in (False, True):
        small.training = training
        try:
            y = small.forward(x)
        except Exception:  # foreign code may raise anything
            return False
        if not (isinstance(y, Tensor) and y.dtype == x.dtype and y.shape == expected.shape):
            return False
        if not torch.allclose(y, expected, rtol=1e-12):
            return False
    return True


def name_in(model: PreTrainedModel, name: str, names: Container[str]) -> str | None:
    """The name in `names` for a name of the manifest: with or without the base model's prefix; None if it is absent."""
    prefix = model.base_model_prefix + "."
    return next((n for n in (name, name.removeprefix(prefix), prefix + name) if n in names), None)


def widths(module: nn.Module) -> Widths:
    """The widths of an `nn.Linear` or `Conv1D`, forward."""
    if isinstance(module, nn.Linear):
        return Widths(module.in_features, module.out_features)
    assert isinstance(module, Conv1D)
    return Widths(int(module.nx), int(module.nf))


_EXPERTS = "experts"
_ROUTERS = ("gate", "router")


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold the experts of a layer, by name."""
    return {name: module for name, module in model.named_modules() if name.rpartition(".")[2] == _EXPERTS}


def routed_modules(model: PreTrainedModel) -> set[str]:
    """The names of all modules inside experts and routers, which stay with the tenant."""
    layers = [name.rpartition(".")[0] for name in experts_of(model)]
    routed = tuple(f"{layer}.{part}." for layer in layers for part in (_EXPERTS, *_ROUTERS))
    return {name for name, _ in model.named_modules() if f"{name}.".startswith(routed)}


def stacks_in(experts: nn.Module) -> tuple[str, str]:
    """The names of a module's two stacks: before the activation (gate and up, or up alone), and after it (down)."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def is_stacked(experts: nn.Module) -> bool:
    """Returns True if a module's two stacks can be offloaded: transformers calls it through its experts interface. A
    norm of each expert's output would need each expert's product, not their sum."""
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


ATTRIBUTES = frozenset(
    (
        *("dtype", "device", "layout", "shape", "ndim", "nbytes", "itemsize"),
        *("requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", "_version", "_backward_hooks"),
        *("is_meta", "is_cpu", "is_cuda", "is_mps", "is_xpu", "is_xla", "is_sparse", "is_nested", "is_quantized"),
    )
)
METHODS = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__", "__hash__"),
        *("is_floating_point", "is_complex", "is_contiguous", "data_ptr", "untyped_storage", "storage_offset"),
        "_has_compatible_shallow_copy_type",
    )
)


def called(func: Callable[..., Any]) -> str:
    """The name under which `__torch_function__` was called: `clone`, or `dtype.__get__` for an attribute."""
    name = getattr(func, "__name__", "")
    owner = getattr(getattr(func, "__self__", None), "__name__", "")
    return f"{owner}.{name}" if name in ("__get__", "__set__", "__delete__") else name


def is_metadata(name: str) -> bool:
    """Returns True if an operation of this name reads no value and changes nothing."""
    attribute, _, access = name.partition(".")
    return attribute in ATTRIBUTES and access == "__get__" if access else name in METHODS
