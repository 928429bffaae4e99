"""Where the experts of a mixture run (`RemoteConfig(experts=...)`): chooses the mode, and prepares a model for it."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.discovery.linears import experts_of, is_stacked, stacks_of
from symbiosis_priv.checkpoints.discovery.skeleton import StoredNames
from symbiosis_priv.checkpoints.layers import GroupSpec
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.errors import CheckpointError, UnsupportedModelError
from tenant.model.experts.stack import OffloadedStack, implementation
from tenant.model.remote_linear import LayerGroup
from tenant.options import Experts

log = logging.getLogger(__name__)

SMALL_FACTOR = 4
"""Largest cost (experts per chosen expert) at which "all" is the default. Mixtral costs 4, gpt-oss-20b 8, Qwen3-30B-A3B
16."""

_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
"""Configuration fields that hold the number of experts per token."""


def choose_mode(model: PreTrainedModel, entries: Sequence[GroupEntry], wanted: Experts | None) -> Experts:
    """Choose where the experts of a model run, and log the choice and its cost. `wanted` is the user's choice, or None.
    Raises `UnsupportedModelError` if the model has no experts, or providers do not serve those that the choice
    offloads."""
    experts: dict[str, Any] = {**experts_of(model)}
    if not experts:
        if wanted not in (None, "local"):
            raise UnsupportedModelError(
                f"experts = {wanted!r} is for mixtures of experts, and {type(model).__name__} has none; leave it out"
            )
        return "local"
    served = {entry.members[0].rpartition(".")[0] for entry in entries if entry.experts > 1}

    def same(name: str, other: str) -> bool:  # a served module's name may lack the base model's prefix or have another
        return f".{name}".endswith(f".{other}") or f".{other}".endswith(f".{name}")

    staying = [name for name in experts if not any(same(name, other) for other in served)]
    if staying and wanted not in (None, "local"):
        kind = type(experts[staying[0]]).__name__
        raise UnsupportedModelError(
            f"experts = {wanted!r} is not possible: the providers do not serve {staying[0]} ({kind}). Choose "
            f"RemoteConfig(experts='local'), which keeps experts here"
        )
    mode: Experts
    if staying:
        mode, reason = "local", "providers do not serve these experts"
    else:
        price = 0.0  # experts per chosen expert; infinite if a configuration lacks the number of chosen experts
        for one in experts.values():
            chosen = next((getattr(one.config, n) for n in _CHOSEN if hasattr(one.config, n)), None)
            price = max(price, one.num_experts / chosen if isinstance(chosen, int) and chosen else math.inf)
        mode = wanted or ("all" if price <= SMALL_FACTOR else "local")
        reason = f"sending every row to every expert (experts='all') costs x{price:.3g} products and bytes"
    size = sum(p.numel() * p.element_size() for module in experts.values() for p in module.parameters()) / 2**30
    here = f". The experts take {size:.1f} GiB of memory here" if mode == "local" else ""
    log.info("%d layers of experts: experts=%r; %s%s", len(experts), mode, reason, here)
    return mode


def offload(experts: Any, entry: GroupEntry, group: LayerGroup, mode: Experts) -> None:
    """Replace one stack of an expert module by a parameter without values. `mode` is not "local". Raises
    `CheckpointError` if the module lacks the stack, or if its shape differs."""
    owner, _, stack = entry.members[0].rpartition(".")
    spec = GroupSpec(entry.members, entry.inputs, entry.outputs, entry.experts, entry.joined)
    if not is_stacked(experts) or spec not in stacks_of(owner, experts):
        raise CheckpointError(
            f"{entry.name} has another shape than in the federation's model; load the same base model"
        )
    if not _offloaded(experts):
        experts.register_state_dict_post_hook(_leave_out)
        experts.register_load_state_dict_pre_hook(_put_back)
        experts.config._experts_implementation = implementation(mode)
    offloaded = OffloadedStack(getattr(experts, stack).shape)
    offloaded.group = group
    setattr(experts, stack, offloaded)


def _leave_out(experts: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Hook on saving: remove the stacks, because their values are at the providers."""
    for stack in _offloaded(experts):
        del state[prefix + stack]


def _put_back(experts: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook on loading: add the stacks, so that loading does not report them as missing."""
    for stack in _offloaded(experts):
        state.setdefault(prefix + stack, getattr(experts, stack))


def _offloaded(experts: nn.Module) -> list[str]:
    return [name for name, stack in experts.named_parameters(recurse=False) if isinstance(stack, OffloadedStack)]


def check_stored(model: PreTrainedModel, folder: Path) -> None:
    """Raise `CheckpointError` if the checkpoint lacks weights of experts that stay: transformers would draw them at
    random."""
    with Checkpoint(folder) as checkpoint:
        stored = StoredNames(model, ()).by_parameter(checkpoint.names())
    for name, experts in experts_of(model).items():
        for parameter, value in experts.named_parameters():
            if not isinstance(value, OffloadedStack) and f"{name}.{parameter}" not in stored:
                raise CheckpointError(
                    f"{folder} has no {name}.{parameter}, and the experts stay here: load the full checkpoint or a "
                    f"slim one made with `tenant prepare --keep-experts`, or choose RemoteConfig(experts='all')"
                )
