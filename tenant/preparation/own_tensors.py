"""The tenant's part of a model: its tensors (embeddings, norms, heads), config.json and the tokenizer's files.

Digests of this part, because the manifest pins the providers' weights only: with other tensors of the tenant's, all
products still verify, and with another tokenizer or chat template, the number of tokens can depend on a text's content,
which providers then learn from the row counts. And slim checkpoints, which hold this part alone.
"""

import hashlib
import shutil
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from symbiosis_priv.arithmetic.quantise import quantise
from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.layers import is_offloaded
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.checkpoints.vetting import read_json
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.system.files import check_unused, replace_atomically

_TOKENIZER = (
    *("tokenizer*", "*vocab*", "merges*", "*tokens*.json", "*.model", "*.tiktoken", "*.spm", "*.bpe", "*.codes"),
    *("*.tokenizer", "word_*.json", "byte_maps.json"),
    *("dict.txt", "tekken.json", "emoji.json", "normalizer.json", "*processor_config.json"),
    *("*.jinja", "*chat_template*", "additional_chat_templates/*"),
)
"""File name patterns of the tokenizer and chat template files that transformers reads."""
_WRITTEN_BY_SAVING = ("transformers_version", "_name_or_path")


def own_digest(store: WeightStore, manifest: Manifest) -> str:
    """Return the SHA-256 of config.json and of every tensor that the manifest does not name. A full checkpoint and its
    slim copy have the same: tensors are named by their parameters, and entries of config.json that `save_pretrained`
    changes are ignored. Raises `CheckpointError`."""
    served = {member for group in manifest.groups for member in group.members} - tied_members(store)
    config = {
        key: value for key, value in read_json(store.path / "config.json").items() if key not in _WRITTEN_BY_SAVING
    }
    sha = hashlib.sha256(msgspec.json.encode(config, order="sorted"))
    with Checkpoint(store.path) as checkpoint:
        for parameter, stored in sorted((store.skeleton.names.parameter(name), name) for name in checkpoint.names()):
            if not is_offloaded(parameter, served):
                shape = checkpoint.shape(stored)
                stack = len(shape) == 3 and checkpoint.is_widened(stored)  # its matrices are read one at a time
                for at in range(shape[0]) if stack else [None]:
                    tensor = checkpoint.tensor(stored, at=at)
                    if not at:
                        sha.update(msgspec.json.encode([parameter, str(tensor.dtype), shape]))
                    sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def tied_members(store: WeightStore) -> set[str]:
    """Return the name of the offloaded LM head if it is tied: the tenant keeps its tensors as the embedding table."""
    return {parameter.rpartition(".")[0] for parameter in store.skeleton.tied}


def check_experts(store: WeightStore, manifest: Manifest) -> None:
    """Raise `CheckpointError` if the experts in a checkpoint are not those of the manifest: a tenant may compute with
    its own copy (`RemoteConfig(experts="local")`). A slim checkpoint may have no experts."""
    with Checkpoint(store.path) as checkpoint:
        stored = store.skeleton.names.by_parameter(checkpoint.names())
    for entry in manifest.groups:
        if entry.experts > 1 and entry.members[0] in stored:
            group = quantise(store.floats(entry.members), weight_bits=manifest.weight_bits)
            if group.digest() != entry.digest:
                raise CheckpointError(
                    f"the experts {entry.name} in {store.path} are not those that providers serve; load the "
                    f"federation's base model or its slim copy"
                )


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer files and chat templates of a checkpoint folder."""
    return sorted({path for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file()})


def tokenizer_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each of `tokenizer_files`, by its path in the folder. Raises `CheckpointError`."""
    digests = {}
    for path in tokenizer_files(folder):
        try:
            with path.open("rb") as file:
                digests[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}); download it again") from error
    return digests


_PLAIN_FILES = ("*.json", "*.model", "*.txt", "*.jinja")  # configuration and tokenizer; no code and no pickles


def write_slim(store: WeightStore, manifest: Manifest, folder: Path, *, keep_experts: bool = False) -> tuple[int, int]:
    """Write the part of a full checkpoint that the tenant loads. Returns the bytes of tensors written, and of others.
    `keep_experts`: also write experts, for `RemoteConfig(experts="local")`. Raises `ConfigError`: the folder is in use;
    `StorageError`: it cannot be written; no partial folder is left."""
    check_unused(folder)
    served = {m for group in manifest.groups if not (keep_experts and group.experts > 1) for m in group.members}
    served -= tied_members(store)
    kept, left_out = dict[str, Tensor](), 0
    with Checkpoint(store.path) as checkpoint:
        for name in checkpoint.names():
            stored = checkpoint.stored(name)
            if is_offloaded(store.skeleton.names.parameter(name), served):
                left_out += sum(tensor.nbytes for tensor in stored.values())
            else:
                kept |= stored

        def write(partial: Path) -> None:
            partial.mkdir()
            save_file(kept, partial / "model.safetensors", metadata={"format": "pt"})
            copy_plain_files(store.path, partial)

        replace_atomically(folder.resolve(), write)
    return sum(t.nbytes for t in kept.values()), left_out


def copy_plain_files(source: Path, folder: Path) -> None:
    """Copy the configuration and the tokenizer of a checkpoint to another folder."""
    for pattern in _PLAIN_FILES:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copy(path, folder)
    for path in tokenizer_files(source):
        copy = folder / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
