"""`from_pretrained` for a split model: loads the tenant's tensors only and replaces frozen linears by `RemoteLayer`s.

The argument `RemoteConfig` makes `from_pretrained` load a split model. transformers finds `RemoteQuantizer` by the
config's `quant_method`.

transformers builds the model on the meta device and passes it to `RemoteQuantizer` before it reads any weight. The
quantizer makes transformers ignore the offloaded weights, so a full checkpoint and a slim checkpoint load alike.
"""

import contextlib
import logging
import math
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self, get_args

import torch
from accelerate.utils import parse_flag_from_env
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from symbiosis_priv.checkpoints.checkpoint import Checkpoint, check_index
from symbiosis_priv.checkpoints.discovery.linears import is_linear, name_in, widths
from symbiosis_priv.checkpoints.discovery.skeleton import check_builds, tied_head
from symbiosis_priv.checkpoints.layers import RoundTrips
from symbiosis_priv.checkpoints.vetting import QUANT_METHOD, vet
from symbiosis_priv.errors import CheckpointError, ConfigError, SymbiosisError, UnsupportedMethodError
from symbiosis_priv.limits import RingBits
from tenant.masking.backend import Backend
from tenant.masking.registry import registered, scheme_named
from tenant.model.connect import BaseWeights, open_backend
from tenant.model.division import division
from tenant.model.experts.modes import check_stored, choose_mode, offload
from tenant.model.offloaded import NO_DISK, OffloadedWeight, set_dtype_and_device
from tenant.model.remote_linear import LayerGroup, RemoteConv1D, RemoteLayer, RemoteLinear, untie_head
from tenant.model.trips import join_groups
from tenant.model.widened import WidenedQuantizer
from tenant.options import Experts, Options

log = logging.getLogger(__name__)


@register_quantization_config(QUANT_METHOD)
@dataclass(kw_only=True)
class RemoteConfig(Options, QuantizationConfigMixin):
    """How to split a model. Pass it as `quantization_config` to `from_pretrained`.

    `RemoteConfig` takes the arguments of `Options`, keyword-only. Most callers set `federation` (a path) and `masking`.

    Raises:
        ConfigError: arguments contradict each other or are out of range.
    """

    quant_method: str = QUANT_METHOD  # type: ignore[assignment]  # transformers finds the quantizer by it

    def __post_init__(self) -> None:
        remote = bool(scheme_named(self.masking).roles)
        alone = " or ".join(repr(scheme.name) for scheme in registered() if not scheme.roles)
        if remote and self.federation is None:
            raise ConfigError(
                f"masking = {self.masking!r} needs RemoteConfig(federation='federation.toml') (masking = {alone} does "
                f"not)"
            )
        if remote and self.weight_bits is not None:
            raise ConfigError(f"weight_bits is for masking = {alone}; otherwise the federation file sets weight_bits")
        if self.ring_bits not in (None, *get_args(RingBits)):
            raise ConfigError(f"ring_bits = {self.ring_bits!r}: choose {' or '.join(map(str, get_args(RingBits)))}")
        if self.experts not in (None, *get_args(Experts)):
            raise ConfigError(
                f"experts = {self.experts!r}: choose one of {', '.join(map(repr, get_args(Experts)))} (there is no "
                f"'counts' any more: providers can read tokens from the rows of each expert)"
            )
        if self.round_trips not in (None, *get_args(RoundTrips)):
            raise ConfigError(f"round_trips = {self.round_trips!r}: choose 2 or 4, or leave it out")
        lowest = {"deadline_s": 0.1, "pool_memory_mib": 0, "row_bucket": 1}
        for name, low in lowest.items():
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name} = {getattr(self, name)} is below {low}")
        if not self.deadline_s < math.inf:
            raise ConfigError(f"deadline_s = {self.deadline_s}: write a finite number of seconds")
        scheme_named(self.masking).read_options(self.masking_options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this object: transformers copies its configurations, and the user's own object must be used."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the entry that transformers may save: the method's name, without the tenant's paths and masking."""
        return {"quant_method": self.quant_method}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> NoReturn:
        """Refuse: transformers calls this method with the quantization_config of a config.json (rule 10)."""
        raise CheckpointError(
            f"config.json has a quantization_config of {QUANT_METHOD}, but a checkpoint does not decide how rows are "
            f"masked and verified; delete that entry, and pass RemoteConfig(...) yourself"
        )


@register_quantizer(QUANT_METHOD)
class RemoteQuantizer(WidenedQuantizer):
    """The quantizer that `from_pretrained(..., quantization_config=RemoteConfig(...))` creates; not used directly."""

    quantization_config: RemoteConfig

    def __init__(self, quantization_config: RemoteConfig, **kwargs: Any) -> None:
        if kwargs.get("pre_quantized", True) or not isinstance(quantization_config, RemoteConfig):
            raise CheckpointError(
                "the model's configuration (config.json, or the argument `config`) has its own quantization_config, "
                "and transformers would use that one instead of yours; delete it, and pass RemoteConfig(...) yourself"
            )
        super().__init__(quantization_config, **kwargs)

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Refuse kernels that config.json names, and sizes that take too long to build. transformers calls this method
        before it fetches kernels and builds the model."""
        parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
        for part in parts:
            for kind in ("_attn_implementation", "_experts_implementation"):
                if "/" in str(getattr(part, kind, None) or ""):
                    raise CheckpointError(
                        f"{config.name_or_path or 'config'} asks for the kernel {getattr(part, kind)}, which "
                        f"transformers would fetch and run; delete that entry from config.json. If you trust the "
                        f"kernel, call model.set_attn_implementation(...) once the model is loaded"
                    )
        check_builds(config)
        return config

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise UnsupportedMethodError(NO_DISK)
        if parse_flag_from_env("ACCELERATE_USE_FSDP") or is_deepspeed_zero3_enabled():
            raise UnsupportedMethodError(
                "FSDP and DeepSpeed's ZeRO-3 shard base weights, and those of a split model are at the provider. Start "
                "the processes with torchrun or accelerate launch --multi_gpu: each trains the same "
                "adapter (DDP)"
            )
        folder = _vetted(kwargs.get("checkpoint_files"), model.config)
        self._identity = _identity(folder)
        with torch.device("cpu"):  # the default device is meta here, and the backend needs real tensors
            backend = open_backend(self.quantization_config, folder)
            weights = BaseWeights(self.quantization_config, folder)
        entries = [facts.entry for facts in backend.facts]
        mode = choose_mode(model, entries, self.quantization_config.experts)
        tied = tied_head(model)
        heads = set() if self.quantization_config.tied_head else {name.rpartition(".")[0] for name in tied}
        members = {m for e in entries for m in e.members if mode != "local" or e.experts == 1} - heads
        log.info("%s: %s", type(model).__name__, division(model, members))
        groups = split(
            model, backend, members, experts=mode, weights=weights, row_bucket=self.quantization_config.row_bucket
        )
        self._trips = [] if self.quantization_config.round_trips == 4 else join_groups(model, groups)
        if self._trips:
            ordinary = sum(entry.composed is None for entry in entries)
            log.info(
                "%s: a decoded token takes %d round trips instead of %d",
                type(model).__name__,
                ordinary - len(self._trips),
                ordinary,
            )
        self._tables = untie_head(model, tied)
        check_stored(model, folder)
        self.prepare(model, folder)
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if _identity(self._folder) != self._identity:
            backend_of(model).close()
            raise CheckpointError(f"{self._folder} changed while it was being loaded; load it again")
        self.fill(model)
        own = next(
            parameter
            for module in model.modules()
            if not isinstance(module, RemoteLayer)
            for parameter in module.parameters(recurse=False)
            if not isinstance(parameter, OffloadedWeight)
        )
        for trip, norm in self._trips:
            trip.take(norm)
        self._trips.clear()
        for table in self._tables:
            table.requires_grad_(False)
        for module in model.modules():
            set_dtype_and_device(module, dtype=own.dtype, device=own.device)
            if isinstance(module, RemoteLayer):
                module.load_bias(dtype=own.dtype, device=own.device)
            elif isinstance(module, PreTrainedModel):
                # some architectures run other code for quantised models; the unsplit model does not run that code
                vars(module.config).pop("_is_quantized", None)
        vars(model)["_enable_peft_forward_hooks"] = _without_ignored_arguments
        model.register_forward_pre_hook(lambda _, args, kwargs: _check_not_ignored(kwargs), with_kwargs=True)
        del model.config.quantization_config  # config.save_pretrained and loggers must not write it
        return model

    def is_serializable(self) -> bool:
        log.warning(
            "the base weights are at the providers, so the base model cannot be saved here; "
            "save the adapter: get_peft_model(...).save_pretrained(folder)"
        )
        return False


@contextlib.contextmanager
def _without_ignored_arguments(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Refuse arguments that a tuner ignores. Replaces PEFT's `_enable_peft_forward_hooks` for tuners that cannot choose
    an adapter per row."""
    _check_not_ignored(kwargs)
    yield


def _check_not_ignored(kwargs: dict[str, Any]) -> None:
    """Refuse arguments that PEFT ignores without a warning: it would use the active adapter for every row."""
    for name in ("adapter_names", "alora_offsets"):
        if kwargs.get(name) is not None:
            raise UnsupportedMethodError(
                f"PEFT ignores {name} for the adapters of this model (it works for LoRA, and adapter_names for RoAd). "
                f"Use tenant.tasks.Tasks, or choose one adapter for all rows: model.set_adapter(name)"
            )


def _identity(folder: Path) -> str:
    with Checkpoint(folder) as checkpoint:
        return checkpoint.identity()


def _vetted(files: list[str] | None, config: PreTrainedConfig) -> Path:
    """Check the files that transformers loads. Returns their folder: that of the revision and subfolder being loaded.
    `files`: the files that transformers reads tensors from. `config`: the model's configuration, with the name that the
    caller gave to `from_pretrained`. Raises `CheckpointError`: transformers would load other files than the
    verification keys are made from, or files outside the folder that the caller named."""
    if not files:
        raise CheckpointError("a split model is loaded from a folder or a hub name, not from a state_dict")
    folder = Path(files[0]).parent
    _check_not_redirected(folder, config)
    vet(folder)
    with Checkpoint(folder) as checkpoint:
        expected = {folder / name for name in checkpoint.files()}
    if {Path(file) for file in files} != expected:
        raise CheckpointError(
            f"transformers loads {', '.join(sorted(Path(file).name for file in files))} from {folder}, but the "
            f"checkpoint's files are {', '.join(sorted(path.name for path in expected))}; load it without `variant`"
        )
    return folder


def _check_not_redirected(folder: Path, config: PreTrainedConfig) -> None:
    """Raise `CheckpointError` if an index or config.json of another folder points to the tensors in `folder`.
    transformers would read config.json, adapter and tokenizer from that folder, and only `folder` is checked. The
    caller's `subfolder=` is not refused, because transformers then reads all files from there."""
    if getattr(config, "transformers_weights", None):
        raise CheckpointError(
            f"the config.json of {config.name_or_path} points to other files (transformers_weights); delete that entry"
        )
    named = Path(str(config.name_or_path))
    if not named.is_dir():  # a name on the hub, whose cache has a folder in `snapshots` for each revision
        named = next((parent for parent in (folder, *folder.parents) if parent.parent.name == "snapshots"), folder)
    if ".." in folder.parts[len(named.parts) :] or not folder.is_relative_to(named):
        raise CheckpointError(f"the index in {named} names a file outside its folder; use another checkpoint")
    for outer in folder.parents:
        if outer.is_relative_to(named):
            for index in outer.glob("*.safetensors.index*.json"):
                check_index(index)


def split(
    model: PreTrainedModel,
    backend: Backend,
    members: Set[str],
    *,
    experts: Experts,
    weights: BaseWeights | None,
    row_bucket: int,
) -> dict[tuple[str, ...], LayerGroup]:
    """Replace each `nn.Linear` in `members` by a `RemoteLinear`, each `Conv1D` by a `RemoteConv1D`, and each stack of
    experts by an `OffloadedStack`. `weights` reads base weights for methods that need them. Returns the layer groups by
    the names of their members. Raises `CheckpointError`: the model lacks a layer, or the layer has other widths."""
    modules = dict(model.named_modules())
    prefix = model.base_model_prefix + "."

    ignored = set(model._keys_to_ignore_on_load_unexpected or ())
    replaced: dict[nn.Module, RemoteLayer] = {}
    groups = dict[tuple[str, ...], LayerGroup]()
    for index, facts in enumerate(backend.facts):
        group = groups[facts.entry.members] = LayerGroup(backend, index, weights, row_bucket=row_bucket)
        if facts.entry.composed is not None or members.isdisjoint(facts.entry.members):
            continue
        if facts.entry.experts > 1:
            name = facts.entry.members[0]
            ignored.add(rf"(^|\.){re.escape(name.removeprefix(prefix))}$")
            if (found := name_in(model, name.rpartition(".")[0], modules)) is not None:
                offload(modules[found], facts.entry, group, experts)
            continue
        for member, (name, outputs) in enumerate(zip(facts.entry.members, facts.entry.outputs, strict=True)):
            ignored.update(rf"(^|\.){re.escape(name.removeprefix(prefix))}\.{kind}$" for kind in ("weight", "bias"))
            found = name_in(model, name, modules)
            if found is None or not is_linear(modules[found]):
                continue  # a head that this model class does not have
            if widths(modules[found]) != (facts.entry.inputs, outputs):
                raise CheckpointError(
                    f"{found} has other widths than in the federation's model; load the same base model"
                )
            linear = modules[found]
            kind = RemoteConv1D if isinstance(linear, Conv1D) else RemoteLinear
            replaced[linear] = kind(*widths(linear), group=group, member=member, bias=linear.bias is not None)
    if not replaced:
        raise CheckpointError(f"{type(model).__name__} has none of the federation's layers; load the same base model")
    for parent in list(model.modules()):
        for leaf, child in list(parent._modules.items()):  # a module may have several parents
            if child in replaced:
                setattr(parent, leaf, replaced[child])
    model._keys_to_ignore_on_load_unexpected = ignored
    return groups


def backend_of(model: nn.Module) -> Backend:
    """Return the backend of a split model, with or without PEFT's wrapper. Raises `SymbiosisError` if the model has no
    offloaded layer."""
    for module in model.modules():
        if isinstance(module, RemoteLayer):
            return module.group.backend
    raise SymbiosisError("this model was not loaded with RemoteConfig; pass it as quantization_config")
