"""Loads an adapter as a copy of a loaded one, its twin, that has the same configuration and the same sizes.

PEFT adds an adapter to a copy of the model's tree of modules: 50 ms and a hundred modules for a model of six layers.
Tasks of one configuration differ in the tensors of their files only. So the modules of a loaded adapter with the
tensors of another file are the other adapter; parts without such tensors are shared. Methods that are not computed
together (`OPERATORS`) have no twins, because their modules may hold more than their file's tensors.
"""

import hashlib
import json
from collections.abc import Hashable, MutableMapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis_priv.checkpoints.vetting import vet_adapter
from symbiosis_priv.errors import CheckpointError
from tenant.tasks.adapter import TENSORS, Adapter, TaskFolder, load
from tenant.tasks.operators import ByPeft, operator_key

_OF_LAYERS = "base_model.model."
"""PEFT's prefix of the names of tensors that belong to a layer. VeRA's projections belong to none."""


def load_as_twin(model: PreTrainedModel, source: TaskFolder, twins: MutableMapping[Hashable, Adapter]) -> Adapter:
    """Load the adapter of a task's folder for inference. Raises what `load` raises.

    Args:
        twins: the model's loaded adapters; may drop those that are not loaded any more.
    """
    config, tensors = vet_adapter(source.folder), _tensors(source)
    shared = tuple(_digest(tensor) for name, tensor in sorted(tensors.items()) if not name.startswith(_OF_LAYERS))
    sizes = tuple((name, tensor.dtype, tensor.shape) for name, tensor in sorted(tensors.items()))
    key = json.dumps(config, sort_keys=True), sizes, shared
    if (twin := twins.get(key)) is not None:
        adapter = twins[key] = twin.twin(tensors)
        return adapter
    adapter = load(model, source, trainable=False)
    if all(operator_key(layer)[0] is not ByPeft for layer in adapter.layers.values()):
        named = adapter.named()
        of_layers = {name for name in tensors if name.startswith(_OF_LAYERS)}
        if named.keys() == of_layers and all(torch.equal(one, tensors[name].to(one)) for name, one in named.items()):
            twins[key] = adapter
    return adapter


def _tensors(source: TaskFolder) -> dict[str, Tensor]:
    try:
        return load_file(source.folder / TENSORS)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{source.folder / TENSORS} is damaged ({error}); fetch it again") from error


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).digest()
