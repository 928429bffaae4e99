"""Writes a slim checkpoint: the tenant's tensors (embeddings, norms, a tied head) without the providers' weights."""

import shutil
from pathlib import Path

from safetensors.torch import save_file

from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.layers import is_offloaded
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.system.files import check_unused, replace_atomically
from tenant.preparation.own_tensors import tied_members, tokenizer_files

_PLAIN_FILES = ("*.json", "*.model", "*.txt", "*.jinja")  # configuration and tokenizer; no code and no pickles


def write_slim(store: WeightStore, manifest: Manifest, folder: Path, *, keep_experts: bool = False) -> tuple[int, int]:
    """Write the part of a full checkpoint that `from_pretrained(folder, quantization_config=RemoteConfig(...))` needs.

    Args:
        keep_experts: also write the experts of a mixture, for `RemoteConfig(experts="local")`.

    Returns:
        (bytes of tensors written, bytes of tensors left out).

    Raises:
        ConfigError: the folder is in use.
        StorageError: the folder cannot be written; no partial folder is left.
    """
    check_unused(folder)
    served = {m for group in manifest.groups if not (keep_experts and group.experts > 1) for m in group.members}
    served -= tied_members(store)
    kept, left_out = {}, 0
    with Checkpoint(store.path) as checkpoint:
        for name in checkpoint.names():
            tensor = checkpoint.tensor(name)
            if is_offloaded(store.skeleton.names.parameter(name), served):
                left_out += tensor.nbytes
            else:
                kept[name] = tensor

        def write(partial: Path) -> None:
            partial.mkdir()
            save_file(kept, partial / "model.safetensors", metadata={"format": "pt"})
            for pattern in _PLAIN_FILES:
                for path in store.path.glob(pattern):
                    if not path.name.endswith(".index.json"):
                        shutil.copy(path, partial)
            for path in tokenizer_files(store.path):
                copy = partial / path.relative_to(store.path)
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(path, copy)

        replace_atomically(folder.resolve(), write)
    return sum(t.nbytes for t in kept.values()), left_out
