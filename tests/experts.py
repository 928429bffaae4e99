"""Mixtures of experts in miniature, one for each layout of experts in transformers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.cases import table
from tests.compatibility.families import build

FAMILIES: dict[str, dict[str, int]] = table(__file__, "families")


def write(family: str, folder: Path, **changes: Any) -> Path:
    """Write a checkpoint of a family, with biases, and weights that are large enough to make experts differ."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    model = build(f"{family}ForCausalLM", **tokens | FAMILIES.get(family, {}) | changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def two_steps(model: Any, ids: Tensor) -> list[Tensor]:
    """Train the parameters that require gradients for two steps. Returns all logits and gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    found = []
    for _ in range(2):
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        found += [out.logits.detach(), *(p.grad.clone() for p in trained)]
        optimizer.step()
        optimizer.zero_grad()
    return found


def join(stack: Tensor, *, joined: str, transposed: bool) -> Tensor:
    """The dense matrix `[o, d]` of a stack `[experts, out, in]` (`[experts, in, out]` if `transposed`)."""
    matrices = stack.transpose(1, 2) if transposed else stack
    return matrices.flatten(0, 1) if joined == "outputs" else matrices.transpose(0, 1).flatten(1)
