"""The tenant's own part of a checkpoint is bound to the prepared model."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError
from tenant.preparation.keys import prepare
from tenant.preparation.slim import write_slim
from tests.experts import write


def test_experts_that_stay_are_those_of_the_federation(tmp_path: Path) -> None:
    """Otherwise a tenant with experts = "local" would mix two models, and every product would still verify."""
    cache = tmp_path / "cache"
    store = WeightStore(write("Mixtral", tmp_path / "model"), cache=cache)
    manifest = store.manifest()
    write_slim(store, manifest, tmp_path / "slim", keep_experts=True)
    other = shutil.copytree(tmp_path / "slim", tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in tensors if "experts.2." in name)
    save_file(tensors | {name: -tensors[name]}, other / "model.safetensors", metadata={"format": "pt"})

    def load(folder: Path) -> None:
        model = WeightStore(folder, cache=cache)
        prepare(store, digest=manifest.digest, columns=8, model=model, cache=cache)

    load(tmp_path / "slim")
    with pytest.raises(CheckpointError, match="experts"):
        load(other)
