"""Reads Hugging Face safetensors checkpoints lazily: one tensor at a time, without unpickling."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
from safetensors import SafetensorError, safe_open

from symbiosis_priv.checkpoints.forms import DESCRIPTIONS, Form
from symbiosis_priv.checkpoints.vetting import form_of, read_json, vet, vet_adapter
from symbiosis_priv.errors import CheckpointError, SymbiosisError, one_line

if TYPE_CHECKING:  # commands look at a folder before they load torch
    from torch import Tensor

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # never code, never pickles
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?(@(?!.*\.\.)\w[\w./-]*)?", re.ASCII)
"""A name on the hub: `name`, `owner/name`, and a revision after @. Other names are never sent to the hub."""
_LONGEST_NAME = 1024  # characters: transformers matches tensor names with patterns and reads numbers from them
T = TypeVar("T")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def resolve(model: str | Path) -> Path:
    """The local folder of a checkpoint: a path unchanged, or the folder in the Hugging Face cache of a hub name,
    `name@revision` for a commit, branch or tag. Raises `CheckpointError`: neither a folder with a config.json nor a
    model that the hub client can download, or a folder that `vetting.vet` refuses."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            if gguf := next((file.name for file in path.glob("*.gguf")), None):
                raise CheckpointError(
                    f"{path} holds GGUF, which is not read; convert it: AutoModelForCausalLM.from_pretrained(path, "
                    f"gguf_file={one_line(gguf)!r}).save_pretrained(new)"
                )
            raise CheckpointError(f"{path} has no config.json; name a Hugging Face checkpoint folder")
        vet(path)
        return path.resolve()
    if path.is_file():
        raise CheckpointError(f"{path} is a file; name the folder that holds the checkpoint's config.json")
    if not _NAME.fullmatch(str(model)):
        raise CheckpointError(f"the folder {path} does not exist; name one that holds a config.json")
    folder = _snapshot(str(model), "config.json", "tokenizer_config.json")
    vet(folder)
    return folder


def resolve_adapter(adapter: str | Path) -> Path:
    """The local folder of a PEFT adapter: a path unchanged, or the folder in the Hugging Face cache of `owner/name` or
    `owner/name@revision`. Raises `ConfigError`: not a PEFT folder; `CheckpointError`: the hub client cannot download
    it, or a folder that `vetting.vet_adapter` refuses."""
    path, name = Path(adapter).expanduser(), str(adapter)
    if not path.exists() and "/" in name.partition("@")[0] and _NAME.fullmatch(name):
        path = _snapshot(name, "adapter_config.json", "adapter_model.safetensors")
    vet_adapter(path)
    return path


def hub_name(folder: Path) -> tuple[str, str] | None:
    """The hub name and the commit of a folder in the Hugging Face cache; None for any other folder."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/", 1), folder.name


def _snapshot(name: str, *needed: str) -> Path:
    """The folder of a hub name in the Hugging Face cache, downloaded if the cache lacks a `needed` file or tensors. The
    cache comes first, without a request, so a name without a revision stays at the commit that the cache has."""
    # imported only for a name, because the import takes as long as reading a local folder
    from huggingface_hub import constants, errors, snapshot_download

    repository, _, revision = name.partition("@")
    asked: dict[str, Any] = {"revision": revision or None, "allow_patterns": _FILES}
    with contextlib.suppress(errors.HFValidationError, OSError):
        folder = Path(snapshot_download(repository, local_files_only=True, **asked))
        # a program may have fetched config.json alone
        sharded = set(check_index(folder / _INDEX).values()) if (folder / _INDEX).is_file() else set()
        if all((folder / one).is_file() for one in {*needed, *sharded}) and any(folder.glob("*.safetensors")):
            return folder
    try:
        return Path(snapshot_download(repository, **asked))
    except Exception as error:  # of the hub's client, and of its HTTP library
        fix = f"name a folder with {needed[0]}"
        if isinstance(error, errors.GatedRepoError):
            why = "gives it only to those who accepted its terms"
            fix = f"accept them on the page of {repository}, then run `hf auth login`, or set HF_TOKEN"
        elif isinstance(error, errors.RevisionNotFoundError):
            why, fix = f"has no revision {revision or 'main'} of it", "name a commit, branch or tag that exists"
        elif isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
            why = "has no such model that you may read"
        elif isinstance(error, errors.HfHubHTTPError):
            why, fix = f"answers with an error ({error.response.status_code})", f"try again later, or {fix}"
        elif constants.HF_HUB_OFFLINE:
            why = "may not be asked, because HF_HUB_OFFLINE is set, and the local cache lacks it"
            fix = f"unset HF_HUB_OFFLINE, or {fix}"
        else:
            why = "cannot be reached from here, and the local cache lacks it"
        raise CheckpointError(
            f"there is no folder {name}, and the Hugging Face hub, where this could be a name, {why}; {fix}"
        ) from error


def check_index(path: Path) -> dict[str, str]:
    """Read the index of a sharded checkpoint. Returns the file name of each tensor, relative to the index. Raises
    `CheckpointError`: the index is damaged, or names a file in another folder."""
    try:
        location = msgspec.convert(read_json(path).get("weight_map"), dict[str, str])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    for name in set(location.values()):
        if not name or Path(name).name != name or name == ".." or "\0" in name:
            raise CheckpointError(f"{path} names a file outside its folder; use another checkpoint")
    return location


class Checkpoint:
    """The tensors of a safetensors checkpoint, by name. A context manager; files are opened once and memory-mapped.
    Every method raises `CheckpointError` for a file that is missing or damaged. A weight that is stored in 8 or 4 bits
    (`forms`) has its own name and its numbers here, and its parts have none."""

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
        try:
            settings = path / "config.json"
            self.form = form_of(settings, read_json(settings)) if settings.is_file() else None
            self._parts = {} if self.form is None else self.form.find(self._location)
        except SymbiosisError:
            self._files.close()
            raise
        self.parts = frozenset(part for parts in self._parts.values() for part in parts.values())
        """The names in the files of the tensors that are parts of a weight."""
        self._names = [name for name in self._location if name not in self.parts] + [*self._parts]

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

    def names(self) -> list[str]:
        return list(self._names)

    def is_widened(self, name: str) -> bool:
        """Returns True if a tensor is stored in 8 or 4 bits, as several tensors."""
        return name in self._parts

    def stored(self, name: str) -> dict[str, Tensor]:
        """What a tensor is made of: the tensors in the files, by their names there."""
        return {part: self._stored(part) for part in self._parts.get(name, {"values": name}).values()}

    def files(self) -> list[str]:
        """The names of the files that hold the tensors."""
        return sorted(set(self._location.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, which is not read."""
        if name in self._parts:
            from symbiosis_priv.checkpoints import widening  # loads torch

            return self._made(name, widening.shape, at="meta")
        return self._read(name, lambda file: tuple(file.get_slice(name).get_shape()))

    def tensor(self, name: str, *, at: int | None = None) -> Tensor:
        """Read one tensor in its stored dtype, or a weight that is stored in 8 or 4 bits without any rounding in
        float32 or float64; only the matrix `at` of a stack."""
        if name in self._parts:
            from symbiosis_priv.checkpoints import widening

            return self._made(name, partial(widening.widen, at=at))
        tensor = self._stored(name) if at is None else self._stored(name)[at]
        if tensor.element_size() == 1 and tensor.is_floating_point():
            raise CheckpointError(f"{self.path} holds {name} as {tensor.dtype} without its scales; fetch it again")
        return tensor

    def _made(self, name: str, make: Callable[[Form, dict[str, Tensor]], T], *, at: str = "cpu") -> T:
        """What `make` makes of the parts of a weight on the device `at`."""
        assert self.form is not None
        parts = {kind: self._stored(part) for kind, part in self._parts[name].items()}
        try:
            if "shape" in parts and (parts["shape"].shape != (2,) or parts["shape"].is_floating_point()):
                raise ValueError("its shape is not two integers")
            return make(
                self.form, {kind: part if kind in DESCRIPTIONS else part.to(at) for kind, part in parts.items()}
            )
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            raise CheckpointError(
                f"{name} in {self.path} cannot be read as {self.form.method} ({one_line(str(error))}); fetch it again"
            ) from error

    def _stored(self, name: str) -> Tensor:
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
