"""Loads an adapter as a copy of a loaded one, its twin, that has the same configuration and the same sizes.

PEFT adds an adapter to a copy of the model's tree of modules: 50 ms and a hundred modules for a model of six layers.
Tasks of one configuration differ in the tensors of their files only. So the modules of a loaded adapter with the
tensors of another file are the other adapter; parts without such tensors are shared. Methods that are not computed
together (`OPERATORS`) have no twins, because their modules may hold more than their file's tensors.
"""

import json
from collections.abc import Hashable, MutableMapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from symbiosis_priv.checkpoints.vetting import vet_adapter
from symbiosis_priv.errors import CheckpointError
from tenant.tasks.adapter import TENSORS, Adapter, TaskFolder, load
from tenant.tasks.operators import ByPeft, operator_key


def load_as_twin(model: PreTrainedModel, source: TaskFolder, twins: MutableMapping[Hashable, Adapter]) -> Adapter:
    """Load the adapter of a task's folder for inference. Raises what `load` raises.

    Args:
        twins: the model's loaded adapters; may drop those that are not loaded any more.
    """
    config, file = vet_adapter(source.folder), source.folder / TENSORS
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); fetch it again") from error
    sizes = tuple((name, tensor.dtype, tensor.shape) for name, tensor in sorted(tensors.items()))
    key = json.dumps(config, sort_keys=True), sizes
    if (twin := twins.get(key)) is not None:
        adapter = twins[key] = twin.twin(tensors)
        return adapter
    adapter = load(model, source, trainable=False)
    if all(operator_key(layer)[0] is not ByPeft for layer in adapter.layers.values()):
        named = adapter.named()
        if named.keys() == tensors.keys() and all(torch.equal(one, tensors[n].to(one)) for n, one in named.items()):
            twins[key] = adapter
    return adapter
