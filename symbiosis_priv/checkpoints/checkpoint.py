"""Reads Hugging Face safetensors checkpoints lazily: one tensor at a time, without unpickling."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec
from safetensors import SafetensorError, safe_open

from symbiosis_priv.checkpoints.vetting import read_json, vet
from symbiosis_priv.errors import CheckpointError

if TYPE_CHECKING:  # commands look at a folder before they load torch
    from torch import Tensor

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # never code, never pickles
_LONGEST_NAME = 1024  # characters: transformers matches tensor names with patterns and reads numbers from them
T = TypeVar("T")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def resolve(model: str | Path) -> Path:
    """The local folder of a checkpoint: a path unchanged, or the Hugging Face cache folder of a hub name. Raises
    `CheckpointError`: neither a folder with a config.json nor a model that the hub client can download, or a folder
    that `vetting.vet` refuses."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} has no config.json; name a Hugging Face checkpoint folder")
        vet(path)
        return path.resolve()
    if path.is_file():
        raise CheckpointError(f"{path} is a file; name the folder that holds the checkpoint's config.json")
    if path.is_absolute() or len(path.parts) > 2 or str(model).startswith("."):  # not a valid name on the hub
        raise CheckpointError(f"the folder {path} does not exist; name one that holds a config.json")
    # imported only for a download, because the import takes as long as reading a local folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        folder = Path(snapshot_download(str(model), allow_patterns=_FILES))
    except (HFValidationError, OSError) as error:
        answered = isinstance(error, HfHubHTTPError | HFValidationError)
        why = "has no such model that you may read" if answered else "cannot be reached from here"
        raise CheckpointError(
            f"there is no folder {model}, and the Hugging Face hub, where this could be a name, {why}; name a folder "
            f"with a config.json"
        ) from error
    vet(folder)
    return folder


class _Index(msgspec.Struct):
    """The used part of model.safetensors.index.json: the file of each tensor."""

    weight_map: dict[str, str]


def check_index(path: Path) -> dict[str, str]:
    """Read the index of a sharded checkpoint. Returns the file name of each tensor, relative to the index. Raises
    `CheckpointError`: the index is damaged, or names a file in another folder."""
    try:
        location = msgspec.convert(read_json(path), _Index).weight_map
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    for name in set(location.values()):
        if not name or Path(name).name != name or name == ".." or "\0" in name:
            raise CheckpointError(f"{path} names a file outside its folder; use another checkpoint")
    return location


class Checkpoint:
    """The tensors of a safetensors checkpoint, by name. A context manager; files are opened once and memory-mapped.
    Every method raises `CheckpointError` for a file that is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = contextlib.ExitStack()
        self._open: dict[str, safe_open] = {}
        if (path / _SINGLE).is_file():  # before an index: transformers uses the same order
            self._location = dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        elif (path / _INDEX).is_file():
            self._location = check_index(path / _INDEX)
        else:
            raise CheckpointError(f"{path} has no {_SINGLE}; convert it: model.save_pretrained(path)")
        for name in self.files():
            if not (path / name).is_file():
                raise CheckpointError(f"{path} has no {name}, which its index names; fetch it again")
        if any(len(name) > _LONGEST_NAME for name in self._location):
            self._files.close()
            raise CheckpointError(f"{path} has a tensor with a name of over {_LONGEST_NAME} characters; fetch it again")

    def _file(self, name: str) -> safe_open:
        if name not in self._open:
            try:
                self._open[name] = self._files.enter_context(safe_open(self.path / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.path / name} is damaged ({error}); fetch it again") from error
        return self._open[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._location

    def names(self) -> list[str]:
        return list(self._location)

    def files(self) -> list[str]:
        """The names of the files that hold the tensors."""
        return sorted(set(self._location.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, which is not read."""
        return self._read(name, lambda file: tuple(file.get_slice(name).get_shape()))

    def tensor(self, name: str) -> Tensor:
        """Read one tensor in its stored dtype."""
        tensor: Tensor = self._read(name, lambda file: file.get_tensor(name))
        return tensor

    def _read(self, name: str, read: Callable[[safe_open], T]) -> T:
        if (file_name := self._location.get(name)) is None:
            raise CheckpointError(f"{self.path} has no tensor {name}; is it the full base checkpoint?")
        try:
            return read(self._file(file_name))
        except (SafetensorError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            # The index names a missing tensor, or this torch does not know the tensor's dtype.
            raise CheckpointError(f"{self.path / file_name} holds no tensor {name} ({error})") from error

    def identity(self) -> str:
        """A hash of inodes, sizes, times and the JSON files, which changes when a file is replaced or written to. The
        times include the change time, because a user cannot set it back, unlike the modification time."""
        rows = []
        for name in self.files():
            s = (self.path / name).stat()
            rows.append((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
        sha = hashlib.sha256(msgspec.json.encode(rows))
        for name in ("config.json", _INDEX):
            path = self.path / name
            sha.update(hashlib.sha256(path.read_bytes() if path.is_file() else b"").digest())
        return sha.hexdigest()
