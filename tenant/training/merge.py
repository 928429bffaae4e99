"""Merges an adapter into the public weights, as a plain checkpoint. `symbiosis-priv tenant merge` runs it.

PEFT merges: its adapter is built on a model whose weights take no memory, and one layer at a time gets its
weight from the checkpoint, is merged, and is written. So the bits are those of `merge_and_unload`, and the memory is
that of the merged layers of one file, whatever the size of the model.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

import tenant.tasks.methods  # noqa: F401 - an adapter may be of one of its methods
from symbiosis_priv.checkpoints.checkpoint import Checkpoint, resolve
from symbiosis_priv.checkpoints.discovery.skeleton import Source, StoredNames, build, load_config
from symbiosis_priv.checkpoints.vetting import read_json, vet_adapter
from symbiosis_priv.errors import CheckpointError, UnsupportedModelError
from symbiosis_priv.system.files import check_unused, replace_atomically
from tenant.model.adapter_limits import MemoryLimit, bounded_config, needs_weights
from tenant.model.loading import check_adapter_is_whole, fitting, shortened
from tenant.preparation.own_tensors import copy_plain_files

_FILE_BYTES = 2 << 30  # of tensors in a file of the merged checkpoint
_ELSEWHERE = "merge it on a machine that holds the model: PeftModel.from_pretrained(model, folder).merge_and_unload()"


def merge(model: str | Path, adapter: Path, output: Path, *, progress: Callable[[int, int], object]) -> int:
    """Write a checkpoint with an adapter merged into it. A checkpoint in 8 or 4 bits is written in the dtype of its
    config.json.

    Returns:
        The number of layers that the adapter changed.

    Raises:
        ConfigError: `adapter` is not a PEFT folder, or `output` is in use.
        CheckpointError: the checkpoint or the adapter is damaged or refused, or they do not fit together.
        UnsupportedModelError: the adapter's method, or how the checkpoint stores a weight, cannot be merged here.
        StorageError: the output cannot be written; no partial folder is left.
    """
    folder = resolve(model)
    check_unused(output)
    config = load_config(folder)
    skeleton = _without_weights(config)
    with Checkpoint(folder) as checkpoint:
        sources = StoredNames(skeleton, ()).by_parameter(checkpoint.names())
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32

        def read(name: str) -> Tensor:
            tensor = checkpoint.tensor(name)
            return tensor.to(dtype) if checkpoint.is_widened(name) else tensor

        adapted, biases = _adapted(skeleton, adapter, sources, read)

        def stored(name: str) -> Tensor:
            return biases[name] if name in biases else read(name)

        layers = [_Layer(name, module, sources, stored) for name, module in _changed(adapted, adapter).items()]
        layer_of = {name: layer for layer in layers for name in layer.stored.values()}
        plan = {
            name: torch.empty(
                checkpoint.shape(name),
                dtype=dtype if checkpoint.is_widened(name) else checkpoint.tensor(name).dtype,  # mapped, not read
                device="meta",
            )
            for name in checkpoint.names()
        }
        files = split_torch_state_dict_into_shards(plan, max_shard_size=_FILE_BYTES)

        def write(made: Path) -> None:
            made.mkdir()
            copy_plain_files(folder, made)
            settings = read_json(folder / "config.json")
            settings.pop("quantization_config", None)
            (made / "config.json").write_text(json.dumps(settings, indent=2))
            done = 0
            for file, names in files.filename_to_tensors.items():
                tensors = {
                    name: (layer_of[name].merged(name) if name in layer_of else stored(name)).contiguous()
                    for name in names
                }
                save_file(tensors, made / file, metadata={"format": "pt"})
                progress(done := done + len(names), len(plan))
            if files.is_sharded:
                index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
                (made / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

        replace_atomically(output.resolve(), write)
    return len(layers)


class _Empty(nn.Parameter):
    """A weight of the base model that takes no memory. PEFT puts the adapter's tensors where a layer's weight is, so
    the weight is on the CPU. All of its elements are one NaN: what a method computes from it shows that it did."""


def _without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    model = build(config)
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            numbers = torch.full((), math.nan, dtype=value.dtype, device="cpu").expand(value.shape)
            module._parameters[name] = _Empty(numbers, requires_grad=False)
    return model


def _adapted(
    skeleton: Any, adapter: Path, sources: Mapping[str, Source], read: Callable[[str], Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    """The adapter with its values, on the model without weights, and the biases that it has trained, by their stored
    names. Raises what `merge` raises."""
    settings = vet_adapter(adapter)
    if needs_weights(settings):
        start = settings.get("init_lora_weights")
        raise UnsupportedModelError(
            f"{adapter} starts from the base weights ({start}); convert it to a plain LoRA with PEFT "
            f"(path_initial_model_for_weight_conversion), or {_ELSEWHERE}"
        )
    fix = "name the base model that it was trained on"
    tensors, biases = load_file(adapter / "adapter_model.safetensors"), dict[str, Tensor]()
    with fitting(adapter, fix=fix):
        config = PeftConfig.from_pretrained(str(adapter), local_files_only=True)
        if config.is_prompt_learning:
            raise UnsupportedModelError(f"{adapter} is a {config.peft_type}: prompts are not part of any weight")
        with MemoryLimit(skeleton, adapter / "adapter_model.safetensors"):
            adapted = get_peft_model(skeleton, bounded_config(config, skeleton, folder=adapter)).eval()
        check_adapter_is_whole(adapted, adapter, fix=fix, without=set())
        changed = _changed(adapted, adapter).items()
        saved = tuple(f"{name}." for name, module in changed if isinstance(module, AuxiliaryTrainingWrapper))
        trained = getattr(config, "bias", "none") not in ("none", False)
        for name in list(tensors):  # of the base model: biases, and copies of embeddings beside an adapter on them
            parameter = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            if parameter in sources and not parameter.startswith(saved):
                value, own = tensors.pop(name), _stored_name(parameter, sources)
                if trained and name.endswith("bias") and value.shape == read(own).shape:
                    biases[own] = value.to(read(own).dtype)
                elif not torch.equal(value.to(read(own).dtype), read(own)):
                    raise CheckpointError(
                        f"the adapter in {adapter} would replace the base model's {parameter}; use another one"
                    )
        set_peft_model_state_dict(adapted, tensors)
    return adapted, biases


class _Layer:
    """A layer that the adapter changes. Its weights are read, merged and dropped again when they are asked for."""

    def __init__(self, name: str, module: Any, sources: Mapping[str, Source], read: Callable[[str], Tensor]) -> None:
        self._module, self._read = module, read
        self._base = module.original_module if isinstance(module, AuxiliaryTrainingWrapper) else module.get_base_layer()
        self.stored = {own: _stored_name(f"{name}.{own}", sources) for own, _ in self._base.named_parameters()}
        self._waiting: dict[str, Tensor] = {}
        for own, value in (*module.named_parameters(), *module.named_buffers()):
            # the original tokens serve to undo a merge
            if not isinstance(value, _Empty) and "trainable_tokens_original" not in own and bool(value.isnan().any()):
                raise UnsupportedModelError(f"PEFT makes {own} of {name} from the base weights; {_ELSEWHERE}")

    def merged(self, name: str) -> Tensor:
        """The merged value of a stored tensor."""
        if name not in self._waiting:
            for own in self.stored:  # PEFT adds in place
                self._set(own, nn.Parameter(self._read(self.stored[own]).clone(), requires_grad=False))
            if isinstance(self._module, AuxiliaryTrainingWrapper):
                made = self._module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            else:
                wrappers = [self._module]  # PEFT wraps a module once for each of its adapted parameters
                while isinstance(inner := wrappers[-1].base_layer, BaseTunerLayer):
                    wrappers.append(inner)
                try:
                    for wrapper in reversed(wrappers):
                        wrapper.merge(safe_merge=False)
                except (RuntimeError, ValueError) as error:  # the layer has no bias for the adapter's, for example
                    raise UnsupportedModelError(f"PEFT cannot merge the adapter: {shortened(error)}") from error
                made = self._module.get_base_layer()
            self._waiting = {self.stored[own]: parameter.detach() for own, parameter in made.named_parameters()}
            for own in self.stored:
                self._set(own, None)
        return self._waiting.pop(name)

    def _set(self, own: str, value: nn.Parameter | None) -> None:
        holder, _, attribute = own.rpartition(".")
        setattr(self._base.get_submodule(holder), attribute, value)


def _changed(adapted: Any, adapter: Path) -> dict[str, Any]:
    """The modules that the adapter changes, by the names that they have without it."""
    model, found = adapted.get_base_model(), dict[str, Any]()
    for name, module in model.named_modules():
        changes = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        if changes and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
            if isinstance(module, BaseTunerLayer) and not hasattr(module, "merge"):
                raise UnsupportedModelError(f"PEFT cannot merge the adapter's method ({type(module).__name__})")
    if model.config.get_text_config().tie_word_embeddings:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        if both := [name for name, module in found.items() if module in ends]:
            raise UnsupportedModelError(
                f"{adapter} changes {both[0]}, and the model's embeddings are its LM head, too; {_ELSEWHERE}"
            )
    return found


def _stored_name(parameter: str, sources: Mapping[str, Source]) -> str:
    source = sources.get(parameter)
    if source is None or source.converter is not None or len(source.parts) != 1:
        raise UnsupportedModelError(
            f"{parameter} is not one tensor of this checkpoint (transformers makes it of several), and the adapter "
            f"changes it; {_ELSEWHERE}"
        )
    return source.parts[0][1]
