"""Finds the linears of a model that are offloaded, and groups those that share an input.

Both sides run the discovery on the checkpoint's config alone: the architecture is built on the meta device (no memory)
and traced once. Linears of one block that receive the *same tensor* are siblings and form one group, whatever their
names are: q/k/v, gate/up, a fused c_attn. There is no list of architectures; the manifest's digest proves that both
sides found the same groups.
Embeddings, a tied LM head, heads of other tasks (classifiers) and linears that the trace does not reach
(cross-attention of a decoder without an encoder) stay with the tenant.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.checkpoints.layers import GroupSpec
from symbiosis_priv.checkpoints.metadata import called, is_metadata
from symbiosis_priv.checkpoints.vetting import on_this_machine, vet
from symbiosis_priv.errors import CheckpointError, UnsupportedModelError

_TRACE_LENGTH = 4
_STACKED = 0.25  # of the linears' weights; a recurrence's small gates may be stacks


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


class StoredNames:
    """Maps the tensors of a checkpoint to parameters.

    Some checkpoints omit the base model's prefix or add it, and some modules were renamed after a checkpoint was
    written (GPT-NeoX's `embed_out` is `lm_head` now). The rules of transformers decide, so all readers agree.
    """

    def __init__(self, model: PreTrainedModel, offloaded: Iterable[str]) -> None:
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._prefix = model.base_model_prefix or None
        self._parameters = model.state_dict()
        self._offloaded = frozenset(offloaded)

    def parameter(self, stored: str) -> str:
        """The parameter that a stored tensor is; a name of no parameter if the model has none for it.

        Raises:
            UnsupportedModelError: it belongs to an offloaded linear, and transformers rearranges it on loading.
        """
        prefix, parameters = self._prefix, self._parameters
        name, rearranged = rename_source_key(stored, self._renamings, self._converters, prefix, parameters)
        if name not in parameters and stored in parameters:
            return stored  # transformers, too, takes a rule back that leads nowhere
        if rearranged is not None and name.rpartition(".")[0] in self._offloaded:
            raise UnsupportedModelError(
                f"{stored} is not stored as {name} is used: transformers rearranges it on loading, which providers do "
                f"not. Use another base model"
            )
        return name

    def by_parameter(self, stored: Iterable[str]) -> dict[str, str]:
        """Stored name of every parameter, for the tensors of a checkpoint.

        Raises:
            CheckpointError: two tensors map to one weight of an offloaded linear.
        """
        found: dict[str, str] = {}
        for name in stored:
            parameter = self.parameter(name)
            other = found.setdefault(parameter, name)
            if other != name and parameter.rpartition(".")[0] in self._offloaded:
                raise CheckpointError(f"{other} and {name} are both {parameter}; delete one of them")
        return found


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


def widths(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of an `nn.Linear` or `Conv1D`."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    assert isinstance(module, Conv1D)
    return int(module.nx), int(module.nf)


def discover(path: Path) -> Skeleton:
    """Find the layer groups of the checkpoint in `path`, from its config.json.

    Raises:
        UnsupportedModelError: the architecture is unknown to transformers or cannot be split, or the weights are
            quantised already.
    """
    with on_this_machine(), torch.random.fork_rng(devices=[]):  # the caller may have seeded torch
        model = _skeleton(load_config(path))
        _refuse_stacked(model)
        kept = _tied_modules(model) | _task_heads(model)
        linears = {n: m for n, m in model.named_modules() if is_linear(m) and n not in kept}
        calls, computed_with = _trace(model, linears)
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


def load_config(path: Path) -> PreTrainedConfig:
    """The configuration of the checkpoint in `path`, as transformers understands it.

    Raises:
        CheckpointError: the folder would decide what only its user may (`trust.vet`).
        UnsupportedModelError: transformers does not know the model type, or the weights are quantised already.
    """
    vet(path)
    with on_this_machine():
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers may raise anything on a foreign file
            raise UnsupportedModelError(f"{path} is of no model type that transformers knows: {error}") from error
    return config


def architecture(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The model class of a checkpoint, from its configuration.

    Raises:
        UnsupportedModelError: transformers knows no class that the configuration names.
    """
    match config.architectures:
        case [str(name), *_]:
            kind = getattr(transformers, name, None)
            if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
                return kind
    raise UnsupportedModelError(
        f"config.json names the architectures {config.architectures}, none known to transformers"
    )


def _skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    kind = architecture(config)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = kind._from_config(config, attn_implementation="eager")
    except Exception as error:  # an architecture's code may raise anything on a foreign configuration
        raise UnsupportedModelError(f"{kind.__name__} cannot be built from its config.json: {error}") from error
    model.eval()
    return model


def _refuse_stacked(model: PreTrainedModel) -> None:
    """Experts stacked into one parameter are no linears: with many of its weights in them, a model cannot be split."""
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
    """Modules that share a parameter (a tied LM head and its embedding): as one of them stays, all of them do."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    shared = {name for names in owners.values() if len(names) > 1 for name in names}
    ties = model.all_tied_weights_keys  # on the meta device, not every tie is made
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


def _trace(model: PreTrainedModel, linears: dict[str, nn.Module]) -> tuple[list[tuple[str, Tensor, int]], set[str]]:
    """Trace one forward pass in inference and one in training.

    Returns:
        The first call of every linear in order, as (name, input, version of the input); and the names of linears whose
        parameters the model also uses outside such calls, which therefore cannot be offloaded.
    """
    trace = _Trace(linears)
    handles = [m.register_forward_pre_hook(trace.enter(n), with_kwargs=True) for n, m in linears.items()]
    handles += [m.register_forward_hook(trace.leave, always_call=True) for m in linears.values()]
    try:
        _run(model.eval(), trace)
        calls = trace.calls
        with contextlib.suppress(UnsupportedModelError):  # a failure shows when the model is trained
            _run(model.train(), trace)
    finally:
        for handle in handles:
            handle.remove()
        model.eval()
    return calls, trace.computed_with


class _Trace(TorchFunctionMode):
    """Records the calls of linears in one forward pass."""

    def __init__(self, linears: dict[str, nn.Module]) -> None:
        super().__init__()
        self.computed_with: set[str] = set()
        self.start()
        self._names = {id(p): name for name, m in linears.items() for p in m.parameters(recurse=False)}

    def start(self) -> None:
        """Another pass: inputs of two passes are never the same tensor."""
        self.calls: list[tuple[str, Tensor, int]] = []  # holds the tensors, so that no id is reused
        self._seen: set[str] = set()
        self._inside = 0

    def enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inside += 1
            if name not in self._seen:
                self._seen.add(name)
                x = args[0] if args else next(iter(kwargs.values()))
                self.calls.append((name, x, x._version))

        return hook

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not self._inside and not is_metadata(called(func)):
            self.computed_with.update(self._names[id(x)] for x in tree_leaves((args, kwargs)) if id(x) in self._names)
        return func(*args, **kwargs)


def _run(model: PreTrainedModel, trace: _Trace) -> None:
    """Run one forward pass on the meta device, where tensors have no values.

    Some models read values. Decoders read them without an explicit mask (transformers looks for packed sequences),
    encoders with one (they look whether it masks anything), and hybrids unless they get a cache and no mask. The call
    is made accordingly. Models that still read values get fake tensors, for which transformers has a tracing path.
    """
    failures = []
    for mode in (contextlib.nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with trace, mode, torch.no_grad():
            ids = torch.zeros((1, _TRACE_LENGTH), dtype=torch.long, device="meta")
            sides = ("", "decoder_") if model.config.is_encoder_decoder else ("",)
            plain = {f"{side}input_ids": ids for side in sides}
            masked = plain | {f"{side}attention_mask": torch.ones_like(ids) for side in sides}
            for inputs in (masked | {"use_cache": False}, plain | {"use_cache": False}, plain | {"use_cache": True}):
                trace.start()
                try:
                    model(**inputs)
                    return
                except Exception as error:  # an architecture's own code, where it was never meant to run
                    failures.append(f"{type(error).__name__}: {error}")
    raise UnsupportedModelError(
        f"{type(model).__name__} cannot be traced without weights; use a base model that runs on token ids alone and "
        f"does not look at values on its way. It said: {'; '.join(dict.fromkeys(failures))}"
    )


def _block(name: str) -> str:
    """The repeated block a module lives in: `model.layers.3.mlp.up_proj` -> `model.layers.3`."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return name.rpartition(".")[0]
