"""Digests of what stays with the tenant: tensors (embeddings, norms, heads), config.json and the tokenizer's files.

The manifest fixes what the providers multiply by, and nothing else. An attacker who could swap the rest of a checkpoint
would make a hybrid of two models whose answers all verify. With a tokenizer or a chat template of their own, they could
also make the number of tokens depend on what a text says, and read the text off the row counts that providers see.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import torch

from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.checkpoints.vetting import read_json
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError

_TOKENIZER = (
    *("tokenizer*", "*vocab*", "merges*", "*tokens*.json", "*.model", "*.tiktoken", "*.spm", "*.bpe", "*.codes"),
    *("dict.txt", "tekken.json", "emoji.json", "normalizer.json", "processor_config.json"),
    *("*.jinja", "*chat_template*", "additional_chat_templates/*"),
)
"""Names of the files that transformers reads tokenizers and chat templates from."""
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


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a checkpoint folder that decide how text becomes tokens, chat templates included."""
    return sorted({path for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file()})


def tokenizer_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each of these files, by its name in the folder.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digests = {}
    for path in tokenizer_files(folder):
        try:
            with path.open("rb") as file:
                digests[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}); fetch it again") from error
    return digests
