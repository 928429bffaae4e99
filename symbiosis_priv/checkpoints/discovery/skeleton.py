"""The model class of a checkpoint, its modules without weights, and its layer groups: all from its config.json; and the
parameter of each stored tensor, by the rules of transformers.
"""

import copy
import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.discovery.known_values import KnownValues, forget_parameters, isolated
from symbiosis_priv.checkpoints.discovery.linears import (
    experts_of,
    is_linear,
    is_stacked,
    routed_modules,
    stacks_in,
    stacks_of,
    widths,
)
from symbiosis_priv.checkpoints.discovery.residuals import with_composed
from symbiosis_priv.checkpoints.discovery.tracing import trace_calls
from symbiosis_priv.checkpoints.layers import DEFAULT_SCOPE, GroupSpec, Scope, is_offloaded
from symbiosis_priv.checkpoints.vetting import QUANT_METHOD, form_of, on_this_machine, vet
from symbiosis_priv.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True)
class Source:
    """The stored tensors that a parameter is made of."""

    parameter: str
    model: PreTrainedModel
    converter: WeightConverter | None  # the rule of transformers that makes it; None if it is stored as it is used
    parts: list[tuple[str | None, str]]  # (the rule's pattern, stored name), in transformers' order

    def targets(self) -> list[str]:
        """The names of all parameters that the rule makes of these tensors."""
        if self.converter is None:
            return [self.parameter]
        first, *others = self.converter.target_patterns
        return [self.parameter, *(self.parameter.replace(first, other) for other in others)]

    def is_widened(self, checkpoint: Checkpoint) -> bool:
        """Returns True if one of the stored tensors is in 8 or 4 bits."""
        return any(checkpoint.is_widened(name) for _, name in self.parts)

    def matrices(self, checkpoint: Checkpoint, parameter: str, count: int) -> list[Callable[[], Tensor]]:
        """Ways to read each of the `count` matrices of a stack alone, so that the stack is not in memory where they are
        stored one by one, or in 8 or 4 bits. Raises what `read` raises."""
        joining, *others = self.converter.operations if self.converter else (None,)
        by_pattern: dict[str | None, list[str]] = {}
        for pattern, name in self.parts:
            by_pattern.setdefault(pattern, []).append(name)
        if joining is None and checkpoint.shape(self.parts[0][1])[:1] == (count,):
            self._check_size(checkpoint, parameter)
            return [partial(checkpoint.tensor, self.parts[0][1], at=index) for index in range(count)]

        def alone(index: int) -> Tensor:
            one = replace(self, parts=[(pattern, names[index]) for pattern, names in by_pattern.items()])
            return one.read(checkpoint, parameter)[0]

        inside = all(isinstance(step, Concatenate) and step.dim > 0 for step in others)
        whole = all(len(names) == count for names in by_pattern.values())
        if isinstance(joining, MergeModulelist) and joining.dim == 0 and inside and whole:
            self._check_size(checkpoint, parameter)
            return [partial(alone, index) for index in range(count)]
        stack = self.read(checkpoint, parameter)
        if len(stack) != count:
            raise CheckpointError(f"{parameter} has {len(stack)} experts, not {count}; fetch the checkpoint again")
        return [partial(stack.__getitem__, index) for index in range(len(stack))]

    def read(self, checkpoint: Checkpoint, parameter: str) -> Tensor:
        """The value of one of the parameters. The sizes of the stored tensors are checked before they are read. Raises
        `CheckpointError`: a stored tensor is missing or damaged, or the tensors do not fit together."""
        if self.converter is not None or self.is_widened(checkpoint):
            self._check_size(checkpoint, parameter)
        if self.converter is None:
            return checkpoint.tensor(self.parts[0][1])
        converter: Any = copy.deepcopy(self.converter)
        for pattern, name in self.parts:
            converter.add_tensor(self.parameter, name, pattern, partial(checkpoint.tensor, name))
        try:
            made: Mapping[str, Tensor | list[Tensor]] = converter.convert(
                self.parameter, model=self.model, config=self.model.config
            )
            tensor = made[parameter]
        except CheckpointError:
            raise
        except Exception as error:  # the operations of transformers raise many types for tensors of other shapes
            raise CheckpointError(
                f"{parameter} cannot be made of {self.parts[0][1]} and {len(self.parts) - 1} more tensors ({error}); "
                f"fetch the checkpoint again"
            ) from error
        return tensor[0] if isinstance(tensor, list) else tensor

    def _check_size(self, checkpoint: Checkpoint, parameter: str) -> None:
        stored = sum(math.prod(checkpoint.shape(name)) for _, name in self.parts)
        if stored > sum(self.model.get_parameter_or_buffer(target).numel() for target in self.targets()):
            raise CheckpointError(
                f"{parameter} would be made of {len(self.parts)} tensors with {stored:,} numbers, more than config.json"
                f" says; fetch the checkpoint again"
            )


class StoredNames:
    """Maps the tensors of a checkpoint to parameters by the rules of transformers, so all readers agree. Checkpoints
    omit the base model's prefix or add it, use earlier names of modules, or store the matrices of experts one by one.
    """

    def __init__(self, model: PreTrainedModel, groups: Iterable[GroupSpec]) -> None:
        rules = get_model_conversion_mapping(model)
        self._model = model
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._parameters = model.state_dict()
        self._offloaded = frozenset(member for group in groups for member in group.members)

    def parameter(self, stored: str) -> str:
        """The name of the parameter that a stored tensor becomes; of the first one if the tensor holds several. If the
        tensor belongs to no parameter, the name has no meaning."""
        return self._renamed(stored)[0]

    def by_parameter(self, stored: Iterable[str]) -> dict[str, Source]:
        """Where the parameters of a model are stored, for the tensors of a checkpoint. Raises `CheckpointError`: two
        tensors map to one offloaded weight, and no rule joins them; `UnsupportedModelError`: a tensor holds both
        offloaded weights and weights of the tenant."""
        converters = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        found: dict[str, Source] = {}
        for name in sorted(stored, key=dot_natural_key):  # the order in which transformers numbers experts
            parameter, pattern = self._renamed(name)
            converter = None if pattern is None else converters[pattern]
            source = found.setdefault(parameter, Source(parameter, self._model, converter, []))
            if source.parts and converter is None and is_offloaded(parameter, self._offloaded):
                raise CheckpointError(f"{source.parts[0][1]} and {name} are both {parameter}; delete one of them")
            source.parts.append((pattern, name))
        for source in found.values():  # transformers drops all of a tensor if its first target is offloaded, or none
            offloaded = [target for target in source.targets() if is_offloaded(target, self._offloaded)]
            kept = [target for target in source.targets() if target not in offloaded]
            if offloaded and kept:
                raise UnsupportedModelError(
                    f"{source.parts[0][1]} holds {offloaded[0]}, which is offloaded, and {kept[0]}, which cannot be; "
                    f"use another base model"
                )
        return found | {target: source for source in found.values() for target in source.targets()}

    def _renamed(self, stored: str) -> tuple[str, str | None]:
        """The name of a stored tensor's parameter, and the pattern of the rule that rearranges it on loading."""
        prefix = self._model.base_model_prefix or None
        name, pattern = rename_source_key(stored, self._renamings, self._converters, prefix, self._parameters)
        if name not in self._parameters and stored in self._parameters:
            return stored, None  # transformers, too, ignores a rule whose result is not a parameter
        return name, pattern


def load_config(path: Path) -> PreTrainedConfig:
    """The configuration of the checkpoint in `path`, as transformers understands it. Raises `CheckpointError`: the
    folder overrides decisions of its user (`vetting.vet`); `UnsupportedModelError`: transformers does not know the
    model type, or the weights are stored in a form that is not read. The entry that states the form is left out."""
    vet(path)
    with on_this_machine():
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers may raise anything on a foreign file
            raise UnsupportedModelError(f"{path} has a model type that transformers does not know: {error}") from error
    return without_form(config)


def without_form(config: PreTrainedConfig) -> PreTrainedConfig:
    """Remove the entry that states in which form weights are stored (`forms`), so that transformers runs no other
    quantizer. Returns the same object. Raises `UnsupportedModelError`: that form is not read; `CheckpointError`: the
    entry is damaged."""
    for part in (config, config.get_text_config(decoder=True)):
        entry = getattr(part, "quantization_config", None)
        if isinstance(entry, dict) and entry.get("quant_method") != QUANT_METHOD:
            form_of(Path(config.name_or_path or "") / "config.json", {"quantization_config": entry})
            del part.quantization_config
    return config


def architecture(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The model class of a checkpoint, from its configuration: without `architectures`, the class for generating text,
    as `AutoModelForCausalLM` takes it. Raises `UnsupportedModelError`: transformers knows no class that the
    configuration names, or none that generates text."""
    kind: Any
    if config.architectures in (None, []) and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return kind  # type: ignore[no-any-return]
    match config.architectures:
        case [str(name), *_]:
            kind = getattr(transformers, name, None)
            if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
                return kind
    raise UnsupportedModelError(
        f"config.json names the architectures {config.architectures}, which transformers does not know"
    )


_INITIALISERS = frozenset(
    (
        *(nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, nn.init.constant_),
        *(Tensor.uniform_, Tensor.normal_, Tensor.fill_, Tensor.zero_),
    )
)


class _OnMeta(TorchFunctionMode):
    """Computes no initial values of unknown tensors, and tells transformers that it builds on the meta device, so that
    it computes none either. transformers finds the device by making an empty tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and args == ([],) and not kwargs:
            return torch.empty(0, dtype=torch.float32, device="meta")
        if func in _INITIALISERS and (tensor := args[0] if args else kwargs["tensor"]).is_meta:
            return tensor
        return func(*args, **kwargs)


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration, in evaluation mode, with parameters on the meta device. Raises
    `UnsupportedModelError`: the model cannot be built."""
    kind = architecture(config)
    try:
        with torch.device("meta"), _OnMeta():
            model: PreTrainedModel = kind._from_config(config, attn_implementation="eager")
            forget_parameters(model)
    except Exception as error:  # an architecture's code may raise any error on a foreign configuration
        raise UnsupportedModelError(f"{kind.__name__} cannot be built from its config.json: {error}") from error
    model.eval()
    return model


@dataclass(frozen=True)
class Skeleton:
    """A model's structure without its weights."""

    groups: tuple[GroupSpec, ...]
    transposed: frozenset[str]  # members stored as `[in, out]` (`Conv1D`), or as `[experts, in, out]`
    biased: frozenset[str]  # members with a bias
    names: StoredNames = field(compare=False, repr=False)
    tied: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The parameters of a tied LM head that is offloaded, and the tenant's parameters that are stored in their
    place."""

    @cached_property
    def members(self) -> dict[str, tuple[GroupSpec, tuple[int, ...]]]:
        """The group of every member, and the shape of its weight in the model."""
        return {
            member: (group, group.shape(outputs, transposed=member in self.transposed))
            for group in self.groups
            for member, outputs in zip(group.members, group.outputs, strict=True)
        }


_BLOCK = re.compile(r"(?:[^.]*\.)*?[0-9]+(?=\.|$)")
_KEPT = 8
_kept: OrderedDict[tuple[str, Scope], Skeleton] = OrderedDict()
"""The skeletons that this process used last, by all settings of their configuration. A trace takes half a second."""


def discover(path: Path, scope: Scope = DEFAULT_SCOPE) -> Skeleton:
    """Find the layer groups of the checkpoint in `path` that are in `scope`, from its config.json. Raises
    `UnsupportedModelError`: the architecture is unknown or cannot be split, or weights are in a form that is not read.
    """
    config = load_config(path)
    settings = _settings(config)
    skeleton = _kept.pop((settings, scope), None) or traced(config, scope)
    _kept[settings, scope] = skeleton
    while len(_kept) > _KEPT:
        _kept.popitem(last=False)
    return skeleton


def check_builds(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModelError` if the model of a configuration cannot be built in few operations. A model that
    `discover` has traced can."""
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)  # the tenant's own
    if _settings(config) not in [settings for settings, _ in list(_kept)]:
        with isolated(), KnownValues():
            build(config)


def _settings(config: PreTrainedConfig) -> str:
    return json.dumps(config.to_dict() | {"_name_or_path": ""}, sort_keys=True, default=str)


def traced(config: PreTrainedConfig, scope: Scope = DEFAULT_SCOPE) -> Skeleton:
    """Find the layer groups of a configuration. Raises what `discover` raises."""
    values = KnownValues()
    with on_this_machine(), isolated():
        with values:
            model = build(config)
        head = tied_head(model) if scope.tied_head else {}
        for parameter in head:  # from here on, a parameter of its own
            owner, _, leaf = parameter.rpartition(".")
            own = torch.empty_like(model.get_parameter(parameter), device="meta")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(own, requires_grad=False))
        kept = _tied_modules(model, without=head) | task_heads(model)
        stacked = {n: m for n, m in experts_of(model).items() if is_stacked(m) and n not in kept and scope.experts}
        kept |= routed_modules(model)
        linears = {n: m for n, m in model.named_modules() if is_linear(m) and n not in kept}
        if not linears and not stacked:
            raise _nothing_to_offload(model)
        with values:
            calls, computed_with = trace_calls(model, linears | stacked)
    names = [call.name for call in calls if call.name not in computed_with]
    groups: dict[tuple[object, str], list[str]] = {}
    for call in calls:
        if call.name in names:
            # the repeated block: `model.layers.3` of `model.layers.3.mlp.up_proj`
            block = _BLOCK.match(call.name) or [call.name.rpartition(".")[0]]
            groups.setdefault((call.input, call.name if call.name in stacked else block[0]), []).append(call.name)
    specs: list[GroupSpec] = []
    for members in groups.values():
        if members[0] in stacked:
            specs += stacks_of(members[0], stacked[members[0]])
            continue
        inputs, _ = widths(linears[members[0]])
        specs.append(GroupSpec(tuple(members), inputs, tuple(widths(linears[m])[1] for m in members)))
    if not specs:
        raise _nothing_to_offload(model)
    if scope.round_trips == 2:
        with on_this_machine(), isolated(), values:
            every = with_composed(model, specs)
        if len(every) == len(specs):
            raise UnsupportedModelError(
                f"round_trips = 2: no block of {type(model).__name__} adds one linear's output to the residual stream, "
                f"normalises the sum (RMSNorm, LayerNorm) and multiplies it by the next linears; remove round_trips"
            )
        specs = every
    offloaded = {name: linears[name] for name in names if name in linears}
    transposed = {n for n, m in offloaded.items() if isinstance(m, Conv1D)}
    transposed |= {f"{n}.{stack}" for n, m in stacked.items() if m.is_transposed for stack in stacks_in(m)}
    return Skeleton(
        groups=tuple(specs),
        transposed=frozenset(transposed),
        biased=frozenset(n for n, m in offloaded.items() if m.bias is not None),
        names=StoredNames(model, specs),
        tied={parameter: source for parameter, source in head.items() if parameter.rpartition(".")[0] in offloaded},
    )


def _nothing_to_offload(model: PreTrainedModel) -> UnsupportedModelError:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return UnsupportedModelError(
        f"{type(model).__name__} has no frozen linear that could be offloaded (its largest weight is "
        f"{max(sizes, key=sizes.__getitem__, default='none')}); use a model of nn.Linear or Conv1D"
    )


def tied_head(model: PreTrainedModel) -> dict[str, str]:
    """The tied parameters of the LM head, and the parameters that they are tied to; empty if there are none."""
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head and is_linear(module)]
    ties = model.all_tied_weights_keys
    return {parameter: source for parameter, source in ties.items() if parameter.rpartition(".")[0] in names}


def _tied_modules(model: PreTrainedModel, *, without: Collection[str]) -> set[str]:
    """Modules that share a parameter, such as a tied LM head and its embedding. If one stays, all of them stay. Ties of
    the parameters in `without` do not count."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    shared = {name for names in owners.values() if len(names) > 1 for name in names}
    ties = model.all_tied_weights_keys  # the meta device does not make every tie
    return shared | {name.rpartition(".")[0] for tie in ties.items() if tie[0] not in without for name in tie}


def task_heads(model: PreTrainedModel) -> set[str]:
    """Modules outside the base model and the LM head: classifiers and other heads, which tenants train and replace. The
    LM head is the output embedding and the other parts of its module (the transform in front of a masked LM's decoder).
    """
    base: nn.Module = model.base_model
    if base is model and type(model).__name__.endswith("Classification"):  # with no base model of its own
        base = nn.ModuleList(child for child in model.children() if isinstance(child, PreTrainedModel))
    outputs = model.get_output_embeddings()
    modules = dict(model.named_modules())
    inside = {id(module) for module in base.modules()}
    for name, module in modules.items():
        if module is outputs:
            parent = modules[name.rpartition(".")[0]]
            inside.update(id(part) for part in (module if parent is model else parent).modules())
    return {name for name, module in modules.items() if id(module) not in inside}
