"""`from_pretrained` for a split model: only the tenant's tensors are loaded, frozen linears become `RemoteLayer`s.

`RemoteConfig` is the one argument that turns a Hugging Face model into a split one; it finds its quantizer by name.

transformers builds the model on the meta device and hands it to this quantizer before any weight is read. Their keys in
the checkpoint are declared as expected leftovers, so that a full checkpoint and one without them load alike.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from symbiosis_priv.checkpoints.checkpoint import Checkpoint, check_index
from symbiosis_priv.checkpoints.layer_discovery import is_linear, widths
from symbiosis_priv.checkpoints.vetting import QUANT_METHOD, vet
from symbiosis_priv.errors import CheckpointError, ConfigError, SymbiosisError, UnsupportedMethodError
from tenant.masking.backend import Backend
from tenant.masking.registry import registered, scheme_named
from tenant.masking.scheme import SessionScheme
from tenant.model.connect import open_backend
from tenant.model.offloaded import NO_DISK, OffloadedParameter
from tenant.model.remote_linear import LayerGroup, RemoteConv1D, RemoteLayer, RemoteLinear
from tenant.options import Options

log = logging.getLogger(__name__)


@register_quantization_config(QUANT_METHOD)
@dataclass(kw_only=True)
class RemoteConfig(Options, QuantizationConfigMixin):
    """How to split a model. Pass it as `quantization_config` to `from_pretrained`.

    Its arguments are those of `Options`, keyword-only: `federation` (a path) and `masking` are those that matter.

    Raises:
        ConfigError: arguments that contradict each other, or are out of range.
    """

    quant_method: str = QUANT_METHOD  # type: ignore[assignment]  # by which transformers finds the quantizer

    def __post_init__(self) -> None:
        remote = bool(scheme_named(self.masking).roles)
        alone = " or ".join(repr(scheme.name) for scheme in registered() if not scheme.roles)
        if remote and self.federation is None:
            raise ConfigError(
                f"masking = {self.masking!r} needs federation = 'federation.toml' (masking = {alone} does not)"
            )
        if remote and self.weight_bits is not None:
            raise ConfigError(f"weight_bits is for masking = {alone}; the federation file says it otherwise")
        if self.status is not None and not isinstance(scheme_named(self.masking), SessionScheme):
            raise ConfigError(f"status is for sessions with verified providers; masking = {self.masking!r} has none")
        lowest = {"deadline_s": 0.1, "pool_memory_mib": 0, "row_bucket": 1, "verify_columns": 8}
        for name, low in lowest.items():
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name} = {getattr(self, name)} is below {low}")
        if not self.deadline_s < math.inf:
            raise ConfigError(f"deadline_s = {self.deadline_s}: write a number above 0")
        scheme_named(self.masking).read_options(self.masking_options)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteConfig:
        """transformers copies its configurations; what is used must be the very object that the user passed."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """What may be written into a folder: a name. Paths, and who masks how, are the tenant's own business."""
        return {"quant_method": self.quant_method}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> NoReturn:
        """Refused: transformers calls this with what a checkpoint's config.json says (rule 10)."""
        raise CheckpointError(
            f"a quantization_config of {QUANT_METHOD} comes from a folder, and a checkpoint does not decide how it is "
            f"masked and verified; delete that entry from its config.json, and pass RemoteConfig(...) yourself"
        )


@register_quantizer(QUANT_METHOD)
class RemoteQuantizer(HfQuantizer):
    """Plugged into `from_pretrained(..., quantization_config=RemoteConfig(...))`; not used directly."""

    quantization_config: RemoteConfig

    def __init__(self, quantization_config: RemoteConfig, **kwargs: Any) -> None:
        if kwargs.get("pre_quantized", True) or not isinstance(quantization_config, RemoteConfig):
            raise CheckpointError(
                "the model's configuration (config.json, or what was passed as `config`) has a quantization_config of "
                "its own, which transformers prefers to yours; delete it there, and pass RemoteConfig(...) yourself"
            )
        super().__init__(quantization_config, **kwargs)

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Called before the model is built, which would fetch and run a kernel that config.json names."""
        parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
        for part in parts:
            for kind in ("_attn_implementation", "_experts_implementation"):
                if "/" in str(getattr(part, kind, None) or ""):
                    raise CheckpointError(
                        f"{config.name_or_path or 'config'} asks for the kernel {getattr(part, kind)}, which would be "
                        f"fetched and run; if that is your own wish, call model.set_attn_implementation(...) once the "
                        f"model is loaded, and delete the entry from its config.json otherwise"
                    )
        return config

    update_tp_plan = update_attn_implementation  # the hook at that moment in transformers 5.17

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise UnsupportedMethodError(NO_DISK)
        folder = _vetted(kwargs.get("checkpoint_files"), model.config)
        self._folder, self._identity = folder, _identity(folder)
        with torch.device("cpu"):  # transformers builds its skeleton on the meta device; ours is real
            backend = open_backend(self.quantization_config, folder)
        split(model, backend)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if _identity(self._folder) != self._identity:
            backend_of(model).close()
            raise CheckpointError(f"{self._folder} changed while it was being loaded; start again")
        for name, parameter in model.named_parameters():
            if parameter.shape != self._shapes.get(name, parameter.shape):  # transformers 5.17 with a quantizer
                backend_of(model).close()
                raise CheckpointError(
                    f"{name} is {list(parameter.shape)} in {self._folder} and {list(self._shapes[name])} in the model, "
                    f"and this transformers does not make another one; install transformers 5.23"
                )
        own = next(p for p in model.parameters() if not isinstance(p, OffloadedParameter))
        for module in model.modules():
            if isinstance(module, RemoteLayer):
                module.seal(dtype=own.dtype, device=own.device)
            elif isinstance(module, PreTrainedModel):
                # architectures take other paths through quantised weights, which the model at home does not take
                vars(module.config).pop("_is_quantized", None)
        vars(model)["_enable_peft_forward_hooks"] = _without_ignored_arguments
        model.register_forward_pre_hook(lambda _, args, kwargs: _check_not_ignored(kwargs), with_kwargs=True)
        del model.config.quantization_config  # config.save_pretrained, loggers and hubs have no use for it
        return model

    @property
    def is_trainable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        log.warning(
            "the base weights are at the providers, so there is no base model here to save; "
            "adapters are: get_peft_model(...).save_pretrained(folder)"
        )
        return False


@contextlib.contextmanager
def _without_ignored_arguments(*args: Any, **kwargs: Any) -> Iterator[None]:
    """PEFT's tuners that choose adapters by row have a method of this kind. For others, PEFT finds this one here."""
    _check_not_ignored(kwargs)
    yield


def _check_not_ignored(kwargs: dict[str, Any]) -> None:
    """Refuse arguments that PEFT drops without a word, so that every row would go through the active adapter."""
    for name in ("adapter_names", "alora_offsets"):
        if kwargs.get(name) is not None:
            raise UnsupportedMethodError(
                f"PEFT ignores {name} for the adapters of this model (it works for LoRA, and adapter_names for RoAd). "
                f"Use LoRA, or choose one adapter for all rows: model.set_adapter(name)"
            )


def _identity(folder: Path) -> str:
    with Checkpoint(folder) as checkpoint:
        return checkpoint.identity()


def _vetted(files: list[str] | None, config: PreTrainedConfig) -> Path:
    """The folder of the very revision and subfolder that are being loaded, if its files are those of a checkpoint.

    Args:
        files: the files that transformers reads tensors from.
        config: the model's configuration, with the name that the caller gave to `from_pretrained`.

    Raises:
        CheckpointError: transformers would load other files than those that the keys are made from, or files outside
            the folder that the caller named.
    """
    if not files:
        raise CheckpointError("a split model is loaded from a folder or a hub name, not from a state_dict")
    folder = Path(files[0]).parent
    _check_not_redirected(folder, config)
    vet(folder)
    with Checkpoint(folder) as checkpoint:
        expected = {folder / name for name in checkpoint.files()}
    if {Path(file) for file in files} != expected:
        raise CheckpointError(
            f"transformers loads {', '.join(sorted(Path(file).name for file in files))} from {folder}, but its "
            f"checkpoint is {', '.join(sorted(path.name for path in expected))}; load it without a variant"
        )
    return folder


def _check_not_redirected(folder: Path, config: PreTrainedConfig) -> None:
    """Refuse tensors that another folder's index or config.json points to.

    transformers would read config.json, adapter and tokenizer in the folder that points, and the tensors in `folder`:
    a hybrid of which only `folder` is checked. The caller's `subfolder=` is no redirection: all files are read there.
    """
    if getattr(config, "transformers_weights", None):
        raise CheckpointError(
            f"the config.json of {config.name_or_path} points to other files (transformers_weights); delete that entry"
        )
    named = Path(str(config.name_or_path))
    if not named.is_dir():  # a name on the hub; its cache keeps every revision in a folder of `snapshots`
        named = next((parent for parent in (folder, *folder.parents) if parent.parent.name == "snapshots"), folder)
    if ".." in folder.parts[len(named.parts) :] or not folder.is_relative_to(named):
        raise CheckpointError(f"the index in {named} names a file outside its folder; use another checkpoint")
    for outer in folder.parents:
        if outer.is_relative_to(named):
            for index in outer.glob("*.safetensors.index*.json"):
                check_index(index)


def split(model: PreTrainedModel, backend: Backend) -> None:
    """Replace every linear that the manifest names by a `RemoteLinear`, every `Conv1D` by a `RemoteConv1D`.

    Raises:
        CheckpointError: the model has none of them, or with other widths.
    """
    modules = dict(model.named_modules())
    prefix = model.base_model_prefix + "."
    ignored = set(model._keys_to_ignore_on_load_unexpected or ())
    replaced: dict[nn.Module, RemoteLayer] = {}
    for index, facts in enumerate(backend.facts):
        group = LayerGroup(backend, index)
        for member, (name, outputs) in enumerate(zip(facts.entry.members, facts.entry.outputs, strict=True)):
            ignored.update(rf"(^|\.){re.escape(name.removeprefix(prefix))}\.{kind}$" for kind in ("weight", "bias"))
            found = next((n for n in (name, name.removeprefix(prefix), prefix + name) if n in modules), None)
            if found is None or not is_linear(modules[found]):
                continue  # a head that this task does not have
            if widths(modules[found]) != (facts.entry.inputs, outputs):
                raise CheckpointError(f"{found} has other widths than the federation's model; the same base model?")
            replaced[modules[found]] = _remote(modules[found], group, member)
    if not replaced:
        raise CheckpointError(f"{type(model).__name__} has none of the federation's layers; the same base model?")
    for parent in list(model.modules()):
        for leaf, child in list(parent._modules.items()):  # a module may have several names
            if child in replaced:
                setattr(parent, leaf, replaced[child])
    model._keys_to_ignore_on_load_unexpected = ignored


def _remote(linear: nn.Module, group: LayerGroup, member: int) -> RemoteLayer:
    kind = RemoteConv1D if isinstance(linear, Conv1D) else RemoteLinear
    return kind(*widths(linear), group=group, member=member, bias=linear.bias is not None)


def backend_of(model: nn.Module) -> Backend:
    """The backend behind a split model, also when PEFT has wrapped it."""
    for module in model.modules():
        if isinstance(module, RemoteLayer):
            return module.group.backend
    raise SymbiosisError("this model was not loaded with RemoteConfig")
