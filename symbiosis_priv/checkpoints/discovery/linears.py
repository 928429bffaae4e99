"""Finds the modules that compute a linear's product, and can be offloaded."""

import copy
from collections.abc import Container

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.arithmetic.ring import Widths


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
