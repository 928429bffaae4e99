"""Keys survive the disk, and damaged files are refused."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from symbiosis_priv.arithmetic.modular import Column
from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.limits import GroupIndex
from tenant.core.blame import BlameKeys
from tenant.core.verifier import VerificationKeys
from tenant.preparation.keys import prepare
from tenant.preparation.own_tensors import tokenizer_files, write_slim
from tenant.preparation.prepared import open_blame_keys, read_keys, tensors_of
from tests.experts import write

GROUP, STACK = GroupIndex(0), GroupIndex(1)

WEIGHT = torch.arange(6, dtype=torch.int16).view(2, 3)


def keys_of_a_linear_and_a_stack() -> VerificationKeys:
    keys = VerificationKeys.fresh()
    keys.add(GROUP, WEIGHT)
    keys.add_stack(STACK, WEIGHT.repeat(4, 1), experts=2, transposed=False)
    return keys


def blame_keys() -> BlameKeys:
    keys = BlameKeys.fresh()
    keys.add(GROUP, WEIGHT, weight_bits=12)
    return keys


def columns_of(keys: VerificationKeys) -> list[Column]:
    dense = [column for group in (GROUP, STACK) for way in DIRECTIONS for column in keys[group, way]]
    return dense + [column for way in DIRECTIONS for column in keys.expert_columns(STACK, way)[1]]


def test_keys_survive_the_disk() -> None:
    keys = keys_of_a_linear_and_a_stack()
    again = read_keys(tensors_of(keys), groups=2)
    for before, after in zip(columns_of(keys), columns_of(again), strict=True):
        assert torch.equal(before.values, after.values)


def test_damaged_keys_are_refused() -> None:
    tensors = tensors_of(keys_of_a_linear_and_a_stack())
    with pytest.raises(KeyError):
        read_keys(tensors, groups=3)
    tensors["secret"] = tensors["secret"][:31]
    with pytest.raises(CheckpointError, match="damaged"):
        read_keys(tensors, groups=1)


def test_incomplete_or_damaged_blame_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "blame.safetensors"
    tensors = tensors_of(blame_keys())
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"lacks.*1\.backward"):
        open_blame_keys(path, groups=2)
    save_file({**tensors, "secret": tensors["secret"][:31].clone()}, path)
    with pytest.raises(CheckpointError, match="damaged"):
        open_blame_keys(path, groups=1)


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
        prepare(store, digest=manifest.digest, model=model, cache=cache)

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
