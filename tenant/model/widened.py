"""Loads checkpoints whose weights are stored in 8 or 4 bits (`symbiosis_priv.checkpoints.forms`) with transformers.

transformers would run the quantizer that config.json names in place of the caller's, and reads such weights only with
it. So the entry is removed from the configuration in memory, the parts of these weights are hidden from transformers,
and their numbers are read as every other reader of this project reads them.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, modeling_utils
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.discovery.skeleton import StoredNames, without_form
from symbiosis_priv.checkpoints.vetting import QUANT_METHOD
from symbiosis_priv.errors import CheckpointError
from tenant.model.offloaded import OffloadedWeight

_METHOD = "symbiosis-priv-widened"
_HIDDEN = "part_of_a_weight"
_get_quantizer: Any = modeling_utils.get_hf_quantizer


class _Hidden(WeightRenaming):
    """Gives some stored tensors a name that belongs to no parameter."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: frozenset[str]) -> None:
        super().__init__(_HIDDEN, _HIDDEN)
        self.hidden = hidden

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return (_HIDDEN if source_key in self.hidden else source_key), None


class WidenedQuantizer(HfQuantizer):
    """Reads the weights that are stored in 8 or 4 bits and that stay on this machine."""

    _folder: Path
    _parts: frozenset[str] = frozenset()
    _left_out: RemovableHandle

    @property
    def is_trainable(self) -> bool:
        return True

    def prepare(self, model: PreTrainedModel, folder: Path) -> None:
        """Hide these weights and their parts from transformers, which then neither misses nor reads them."""
        self._folder = folder
        with Checkpoint(folder) as checkpoint:
            self._parts = checkpoint.parts
            widened = self._widened(model, checkpoint) if checkpoint.form else {}
        if not self._parts:
            return

        def leave_out(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
            for name in widened:
                state.pop(prefix + name, None)

        self._left_out = model.register_state_dict_post_hook(leave_out)
        model._keys_to_ignore_on_load_unexpected = {_HIDDEN} | set(model._keys_to_ignore_on_load_unexpected or ())

    def update_weight_conversions(self, weight_conversions: list[Any], *_: Any) -> list[Any]:
        return [_Hidden(self._parts), *weight_conversions] if self._parts else weight_conversions

    @torch.no_grad()
    def fill(self, model: PreTrainedModel) -> None:
        """Read the weights, once transformers has loaded the others. Raises `CheckpointError`: a weight is damaged, or
        has another shape."""
        if not self._parts:
            return
        self._left_out.remove()
        with Checkpoint(self._folder) as checkpoint:
            for name, source in self._widened(model, checkpoint).items():
                held = model.get_parameter(name)
                if held.is_meta:
                    here = nn.Parameter(torch.empty_like(held, device="cpu"), held.requires_grad)
                    torch.utils.swap_tensors(held, here)  # the same parameter wherever it is tied to
                stack = held.ndim == 3  # its matrices are read one at a time
                reads = (
                    source.matrices(checkpoint, name, len(held)) if stack else [partial(source.read, checkpoint, name)]
                )
                for index, read in enumerate(reads):
                    value, part = read(), held[index] if stack else held
                    if part.shape != value.shape:
                        raise CheckpointError(
                            f"{name} is {list(value.shape)} in {self._folder} and {list(part.shape)} in the model; "
                            f"load it with the config.json that it was published with"
                        )
                    part.copy_(value)

    @staticmethod
    def _widened(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, Any]:
        """The sources of the model's parameters that are stored in 8 or 4 bits and are not offloaded. Raises
        `CheckpointError`: the scales of one are missing."""
        sources = StoredNames(model, ()).by_parameter(checkpoint.names())
        found = {}
        for name, value in model.named_parameters():
            source = None if isinstance(value, OffloadedWeight) else sources.get(name)
            if source is not None and source.is_widened(checkpoint):
                found[name] = source
            elif source is not None:
                for _, stored in source.parts:
                    checkpoint.tensor(stored)  # mapped, not read: raises if it needs scales
        return found


@register_quantization_config(_METHOD)
@dataclass(kw_only=True)
class WidenedConfig(QuantizationConfigMixin):
    """Makes `from_pretrained` read a whole model without the quantizer that its config.json names."""

    quant_method: str = _METHOD  # type: ignore[assignment]  # transformers finds the quantizer by it


@register_quantizer(_METHOD)
class _WholeModel(WidenedQuantizer):
    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        self.prepare(model, Path(kwargs["checkpoint_files"][0]).parent)
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        self.fill(model)
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]  # an ordinary model from here on
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                vars(module.config).pop("_is_quantized", None)
        return model


def _of_the_caller(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of transformers' function: if the caller asks for a `WidenedQuantizer`, config.json's entry is
    read as data (`Form.of`), and no other quantizer runs."""
    if getattr(quantization_config, "quant_method", None) in (_METHOD, QUANT_METHOD):
        config = without_form(config)
    return _get_quantizer(config, quantization_config, *args, **kwargs)


modeling_utils.get_hf_quantizer = _of_the_caller
