"""The tensors that stay with the tenant (embeddings, norms, heads), as one digest.

The manifest fixes what the providers multiply by, and nothing else. Whoever could swap the rest of a checkpoint, or its
config.json, would make a hybrid of two models whose answers all verify. This digest binds the rest.
"""

from __future__ import annotations

import hashlib

import msgspec
import torch

from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.checkpoints.vetting import read_json
from symbiosis_priv.checkpoints.weights import WeightStore

_WRITTEN_BY_SAVING = ("transformers_version", "_name_or_path")


def own_digest(store: WeightStore, manifest: Manifest) -> str:
    """SHA-256 over every tensor of a checkpoint that the manifest does not name, and over its config.json.

    A full checkpoint and one of the tenant's own tensors alone have the same. Tensors go by the names of their
    parameters; entries of config.json that only saving a model changes are left out.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    served = {member for group in manifest.groups for member in group.members}
    config = {
        key: value for key, value in read_json(store.path / "config.json").items() if key not in _WRITTEN_BY_SAVING
    }
    sha = hashlib.sha256(msgspec.json.encode(config, order="sorted"))
    with Checkpoint(store.path) as checkpoint:
        for parameter, stored in sorted((store.skeleton.names.parameter(name), name) for name in checkpoint.names()):
            if parameter.rpartition(".")[0] not in served:
                tensor = checkpoint.tensor(stored)
                sha.update(msgspec.json.encode([parameter, str(tensor.dtype), list(tensor.shape)]))
                sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
