"""The plain model with the rounded weights that providers multiply by, to compare a split model with."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.discovery.linears import name_in
from symbiosis_priv.checkpoints.layers import Scope
from symbiosis_priv.checkpoints.manifest import separate
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS
from tenant.model.experts.modes import choose_mode
from tenant.model.loading import load_model
from tenant.options import Experts


@torch.no_grad()
def rounded_model(
    model: str | Path,
    *,
    weight_bits: int = DEFAULT_WEIGHT_BITS,
    dtype: torch.dtype = torch.float32,
    kind: Any = AutoModelForCausalLM,
    experts: Experts | None = None,
    tied_head: bool = False,
    cache: Path | None = None,
) -> Any:
    """Load an ordinary model, in evaluation mode, whose offloaded linears hold rounded weights `Wq * s`.

    A split model differs from this model only by the rounding of activations. Both differ from the checkpoint's own
    model by the rounding of weights (docs/same-model.md). The function needs the full checkpoint and memory for it.

    Args:
        model: the full checkpoint's folder, or a name on the hub.
        weight_bits: weight bits of the federation that serves the model.
        experts: as in `RemoteConfig`. Experts that stay with the tenant are not rounded.
        tied_head: as in `RemoteConfig`. With True, the LM head is a rounded copy of the embedding table.
        cache: folder for quantised weights; the user's cache folder if None.

    Raises:
        SymbiosisError: `load_model` or quantising has failed.
    """
    folder = resolve(model)
    plain = load_model(folder, dtype=dtype, kind=kind)
    modules = dict(plain.named_modules())

    def module(name: str) -> Any:
        found = name_in(plain, name, modules)
        return None if found is None else modules[found]

    store = WeightStore(folder, weight_bits=weight_bits, scope=Scope(tied_head=tied_head), cache=cache)
    entries = store.manifest().groups
    mode = choose_mode(plain, entries, experts)
    for index, entry in enumerate(entries):
        if entry.experts > 1 and mode == "local":
            continue
        group = store.group(index)
        rounded = group.weight.to(torch.float64) * group.channel_scale[:, None]
        if entry.experts > 1:
            owner, _, stack = entry.members[0].rpartition(".")
            owned = module(owner)
            getattr(owned, stack).copy_(
                separate(rounded, experts=entry.experts, joined=entry.joined, transposed=owned.is_transposed)
            )
            continue
        for name, weight in zip(entry.members, rounded.split(entry.outputs), strict=True):
            linear = module(name)
            if linear is None:  # a head that this model does not have
                continue
            if f"{name}.weight" in store.skeleton.tied:
                linear.weight = nn.Parameter(linear.weight.detach().clone())
            linear.weight.copy_(weight.t() if isinstance(linear, Conv1D) else weight)
    return plain
