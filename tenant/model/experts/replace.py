"""Replaces offloaded expert stacks in a model, and checks that the checkpoint holds the stacks that stay."""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.discovery.linears import experts_of, is_stacked, stacks_of
from symbiosis_priv.checkpoints.discovery.stored_names import StoredNames
from symbiosis_priv.checkpoints.layers import GroupSpec
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.errors import CheckpointError
from tenant.model.experts.forward import implementation
from tenant.model.experts.stack import OffloadedStack
from tenant.model.remote_linear import LayerGroup
from tenant.options import Experts


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
    setattr(experts, stack, OffloadedStack.of_group(group, getattr(experts, stack).shape))


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
