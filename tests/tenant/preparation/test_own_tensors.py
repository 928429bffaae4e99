"""The tenant's own part of a checkpoint is bound to the prepared model."""

import re
import shutil
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError
from tenant.preparation.keys import prepare
from tenant.preparation.own_tensors import tokenizer_files, write_slim
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


def test_every_file_that_a_tokenizer_of_transformers_reads_is_bound(tmp_path: Path) -> None:
    """A file that is not bound could be replaced: it decides the number of rows of a text."""
    sources = (Path(transformers.__file__).parent / "models").glob("*/tokenization_*.py")
    stated = re.compile(r"^VOCAB_FILES_NAMES\b[^{]*({[^}]*})", re.MULTILINE)
    tables = [table for source in sources for table in stated.findall(source.read_text(encoding="utf-8"))]
    names = {name for table in tables for name in re.findall(r':\s*"([^"]+)"', table)}
    assert {"tokenizer.json", "spiece.model", "prophetnet.tokenizer"} <= names
    for name in names:
        (tmp_path / name).touch()
    assert {path.name for path in tokenizer_files(tmp_path)} == names
