"""Reading safetensors checkpoints: whole, sharded, damaged and malicious."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from symbiosis_priv.checkpoints.checkpoint import Checkpoint, resolve
from symbiosis_priv.errors import CheckpointError
from tests.cases import cases

INDEX = "model.safetensors.index.json"


@pytest.fixture
def copied(llama_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_path, tmp_path / "copy"))


@pytest.fixture
def sharded(llama: PreTrainedModel, tmp_path: Path) -> Path:
    llama.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    return tmp_path / "sharded"


def test_every_tensor_is_read_as_stored(llama: PreTrainedModel, llama_path: Path) -> None:
    state = llama.state_dict()
    with Checkpoint(llama_path) as checkpoint:
        assert set(checkpoint.names()) == set(state)
        for name in checkpoint.names():
            assert torch.equal(checkpoint.tensor(name), state[name])


@cases(__file__, "foreign_files")
def test_an_index_names_files_of_its_own_folder_only(name: str, sharded: Path) -> None:
    (sharded.parent / "secret.safetensors").write_bytes(b"x")
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        Checkpoint(sharded)


@cases(__file__, "damaged_indexes")
def test_a_damaged_index_is_a_checkpoint_error(index: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint(sharded)


def test_a_tensor_that_the_index_names_and_no_file_has_is_an_error(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["promised.weight"] = index["weight_map"]["lm_head.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    with Checkpoint(sharded) as checkpoint, pytest.raises(CheckpointError, match=r"promised\.weight"):
        checkpoint.tensor("promised.weight")


@given(st.integers(0, 10**9), st.binary(max_size=40))
def test_a_damaged_file_is_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, llama_path: Path, cut: int, tail: bytes
) -> None:
    path = tmp_path_factory.mktemp("damaged")
    whole = (llama_path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: cut % len(whole)] + tail)
    with pytest.raises(CheckpointError, match="damaged"), Checkpoint(path):
        pass


def test_a_checkpoint_without_safetensors_says_what_to_do(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="save_pretrained"):
        Checkpoint(copied)


@pytest.mark.parametrize("change", ["size", "time", "config", "shard", "in place", "copy"])
def test_the_identity_changes_with_the_files(change: str, sharded: Path) -> None:
    def identity() -> str:
        with Checkpoint(sharded) as checkpoint:
            return checkpoint.identity()

    file, before = min(sharded.glob("*.safetensors")), identity()
    stat = file.stat()
    assert identity() == before
    if change == "size":
        save_file({**load_file(file), "one.more": torch.zeros(1)}, file)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "time":
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    elif change == "config":
        config = json.loads((sharded / "config.json").read_text())
        (sharded / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    elif change == "in place":  # the last byte, and the times set back
        with file.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            last = opened.read(1)
            opened.seek(-1, os.SEEK_END)
            opened.write(bytes([last[0] ^ 1]))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "copy":  # the same bytes in another file
        shutil.copy2(file, sharded / "copy")
        (sharded / "copy").rename(file)
    else:
        file.rename(sharded / "renamed.safetensors")
        index = (sharded / INDEX).read_text().replace(file.name, "renamed.safetensors")
        (sharded / INDEX).write_text(index)
    assert identity() != before


def test_resolve(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(copied) == copied.resolve()
    monkeypatch.chdir(copied.parent)
    assert resolve("copy") == copied.resolve()
    monkeypatch.setenv("HOME", str(copied.parent))
    assert resolve("~/copy") == copied.resolve()


def test_resolve_refuses_a_folder_without_a_config_and_a_file(copied: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve(copied.parent)
    with pytest.raises(CheckpointError, match="is a file; name the folder"):
        resolve(copied / "config.json")


@pytest.mark.parametrize("name", ["somebody/not-in-the-cache", "no such/model/name", "/nowhere/at/all"])
def test_resolve_names_what_it_cannot_find(name: str) -> None:
    """In words of our own: the hub's client says to check the internet connection."""
    with pytest.raises(CheckpointError, match=f"folder {name}(, and the Hugging Face hub| does not exist)") as raised:
        resolve(name)
    assert "connection" not in str(raised.value)


def test_the_name_of_a_tensor_is_limited(copied: Path) -> None:
    """transformers makes an integer of the digits in a name, and Python refuses more than 4,300 of them."""
    file = copied / "model.safetensors"
    save_file(load_file(file) | {"model.layers." + "9" * 5000: torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match="name"):
        Checkpoint(copied)
