"""The layer groups of a checkpoint, from its config.json."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.checkpoints.discovery.architecture import build, load_config
from symbiosis_priv.checkpoints.discovery.linears import is_linear, widths
from symbiosis_priv.checkpoints.discovery.stored_names import StoredNames
from symbiosis_priv.checkpoints.discovery.tracing import trace_calls
from symbiosis_priv.checkpoints.layers import GroupSpec
from symbiosis_priv.checkpoints.vetting import on_this_machine
from symbiosis_priv.errors import UnsupportedModelError

_STACKED = 0.25  # share of the linears' weights; the small gates of a recurrence may be stacked


@dataclass(frozen=True)
class Skeleton:
    """A model's structure without its weights."""

    groups: tuple[GroupSpec, ...]
    transposed: frozenset[str]
    """Members stored as `[in, out]` (`Conv1D`)."""
    biased: frozenset[str]
    """Members with a bias."""
    names: StoredNames = field(compare=False, repr=False)

    @cached_property
    def widths(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of every member."""
        pairs = [
            (member, (outputs, g.inputs))
            for g in self.groups
            for member, outputs in zip(g.members, g.outputs, strict=True)
        ]
        return dict(pairs)


def discover(path: Path) -> Skeleton:
    """Find the layer groups of the checkpoint in `path`, from its config.json.

    Raises:
        UnsupportedModelError: the architecture is unknown to transformers or cannot be split, or the weights are
            quantised already.
    """
    with on_this_machine(), torch.random.fork_rng(devices=[]):  # the caller may have seeded torch
        model = build(load_config(path))
        _refuse_stacked(model)
        kept = _tied_modules(model) | _task_heads(model)
        linears = {n: m for n, m in model.named_modules() if is_linear(m) and n not in kept}
        calls, computed_with = trace_calls(model, linears)
    calls = [call for call in calls if call[0] not in computed_with]
    groups: dict[tuple[int, int, str], list[str]] = {}
    for name, x, version in calls:
        groups.setdefault((id(x), version, _block(name)), []).append(name)
    specs = []
    for members in groups.values():
        inputs, _ = widths(linears[members[0]])
        specs.append(GroupSpec(tuple(members), inputs, tuple(widths(linears[m])[1] for m in members)))
    if not specs:
        raise UnsupportedModelError(f"{type(model).__name__} has no frozen linear that could be offloaded")
    offloaded = {name: linears[name] for name, *_ in calls}
    return Skeleton(
        groups=tuple(specs),
        transposed=frozenset(n for n, m in offloaded.items() if isinstance(m, Conv1D)),
        biased=frozenset(n for n, m in offloaded.items() if m.bias is not None),
        names=StoredNames(model, offloaded),
    )


def _refuse_stacked(model: PreTrainedModel) -> None:
    """Refuse a model that has many of its weights in stacked experts: one parameter of many experts is not a linear."""
    linear, stacked = 0, {}
    for name, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if is_linear(module):
                linear += parameter.numel()
            elif sum(size > 1 for size in parameter.shape) > 2 and not isinstance(module, nn.modules.conv._ConvNd):
                stacked[f"{name}.{kind}"] = parameter.numel()
    if sum(stacked.values()) > linear * _STACKED:
        raise UnsupportedModelError(
            f"many weights of {type(model).__name__} are stacks of matrices (a mixture of experts), which cannot be "
            f"offloaded yet: {next(iter(stacked))} and {len(stacked) - 1} more. Use a model of nn.Linear or Conv1D"
        )


def _tied_modules(model: PreTrainedModel) -> set[str]:
    """Modules that share a parameter, such as a tied LM head and its embedding. If one stays, all of them stay."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    shared = {name for names in owners.values() if len(names) > 1 for name in names}
    ties = model.all_tied_weights_keys  # the meta device does not make every tie
    return shared | {parameter.rpartition(".")[0] for tie in ties.items() for parameter in tie}


def _task_heads(model: PreTrainedModel) -> set[str]:
    """Modules outside the base model and the LM head: classifiers and other heads, which tenants train and replace.

    The LM head is the output embedding and the other parts of its module (the transform in front of a masked LM's
    decoder).
    """
    base = model.base_model
    outputs = model.get_output_embeddings()
    modules = dict(model.named_modules())
    inside = {id(module) for module in base.modules()}
    for name, module in modules.items():
        if module is outputs:
            parent = modules[name.rpartition(".")[0]]
            inside.update(id(part) for part in (module if parent is model else parent).modules())
    return {name for name, module in modules.items() if id(module) not in inside}


def _block(name: str) -> str:
    """The repeated block of a module: `model.layers.3.mlp.up_proj` -> `model.layers.3`."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return name.rpartition(".")[0]
