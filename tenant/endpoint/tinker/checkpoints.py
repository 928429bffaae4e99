"""Checkpoints on disk: FOLDER/owner/run/kind/name is a PEFT folder, with a record, and perhaps an optimizer's state.

Every part of a path is checked before it is joined to FOLDER: the owner is a digest, runs have the form that this
endpoint gives them, kinds are three words, and names are those of tasks (`check_name`), which have no separator and
begin with no dot. A folder is written beside its place and renamed, so a checkpoint is whole or absent.
"""

import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ValidationError
from tinker import types

from symbiosis_priv.errors import ConfigError, SymbiosisError
from symbiosis_priv.system.files import lock, read_limited, replace_atomically, storing
from tenant.endpoint.api.errors import ApiError
from tenant.tasks.adapter import CONFIG, TENSORS, check_name

WEIGHTS, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
TYPES = {WEIGHTS: "training", SAMPLER: "sampler", EXTERNAL: "external"}
OPTIMIZER = "optimizer.safetensors"
FILES = (CONFIG, TENSORS)
"""What makes a PEFT folder, and what clients may download."""
_RECORD = "checkpoint.json"
_RECORD_BYTES = 64 << 10
_RUN = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}")
_OWNER = re.compile(r"[0-9a-f]{16}|own")
_NEW = ".new-"


class Record(BaseModel, frozen=True):
    """What is stored with a checkpoint. Times are seconds since 1970. `snapshot`: it ends with its session."""

    base_model: str
    lora: types.LoraConfig
    time: float
    expires: float | None = None
    optimizer: bool = False
    snapshot: bool = False
    metadata: dict[str, str] | None = None

    @property
    def expired(self) -> bool:
        return self.expires is not None and self.expires <= time.time()


class Place(NamedTuple):
    """The place of a checkpoint."""

    owner: str
    run: str
    kind: str
    name: str

    @property
    def uri(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


class Checkpoints:
    """The checkpoints below one folder, which one process uses at a time. Together they take at most half of what the
    disk has free at the start, with them, and those of one of `owners` keys an equal part of it. Raises `ConfigError`:
    another process uses the folder; `StorageError`: the folder cannot be written."""

    def __init__(self, folder: Path, *, owners: int) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        with storing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        if not lock(self._descriptor):
            os.close(self._descriptor)
            raise ConfigError(f"--tinker {folder}: another process uses this folder; choose another one")
        for left in folder.glob(f"*/*/*/{_NEW}*"):
            shutil.rmtree(left, ignore_errors=True)
        for place, record in list(self.all()):
            if record.snapshot:
                self.delete(place)
        used = sum(self.size(place) for place, _ in self.all())
        self.limit = (shutil.disk_usage(folder).free + used) // 2 // owners

    def close(self) -> None:
        os.close(self._descriptor)

    def place(self, owner: str, run: str, kind: str, name: str) -> Place:
        """Return a place below the folder. Raises `ApiError` for any other."""
        try:
            if _OWNER.fullmatch(owner) and _RUN.fullmatch(run) and kind in TYPES:
                return Place(owner, run, kind, check_name(name))
        except ConfigError as error:
            raise ApiError(400, f"the name of a checkpoint: {error}", param="path") from None
        raise ApiError(404, "there is no such training run or kind of checkpoint", param="path")

    def parse(self, owner: str, uri: str) -> Place:
        """Return the place of `tinker://run/kind/name`. Raises `ApiError`."""
        if (found := re.fullmatch("tinker://([^/]*)/([^/]*)/([^/]*)", uri)) is None:
            raise ApiError(400, "write a checkpoint as tinker://RUN/weights/NAME", param="path")
        return self.place(owner, *found.groups())

    def folder(self, place: Place) -> Path:
        return self._folder.joinpath(*place)

    def record(self, place: Place, *, expired: bool = False) -> Record:
        """Read a record. Raises `ApiError` if there is none, or its time is over and not `expired`."""
        with self._lock:
            found = self._read(place)
        if found is None or (found.expired and not expired):
            raise ApiError(404, f"there is no checkpoint {place.uri}", code="not_found", param="path")
        return found

    def size(self, place: Place) -> int:
        with os.scandir(self.folder(place)) as files:
            return sum(one.stat(follow_symlinks=False).st_size for one in files)

    def all(self, owner: str = "*") -> Iterator[tuple[Place, Record]]:
        """All checkpoints, also snapshots and those whose time is over."""
        for path in self._folder.glob(f"{owner}/*/*/*"):
            place = Place(*path.relative_to(self._folder).parts)
            if not place.name.startswith(_NEW) and (record := self._read(place)) is not None:
                yield place, record

    def listed(self, owner: str) -> list[tuple[Place, Record]]:
        """Return the checkpoints that an owner can use by their names, the newest one first."""
        with self._lock:
            found = [one for one in self.all(owner) if not one[1].snapshot and not one[1].expired]
        return sorted(found, key=lambda one: one[1].time, reverse=True)

    def save(
        self, place: Place, record: Record, write: Callable[[Path], object], *, size: int, overwrite: bool = False
    ) -> None:
        """Write a checkpoint. `write`: writes the files into a new folder, about `size` bytes. Raises `ApiError`: there
        is one of this name, or the owner's part of the disk is used up; `StorageError`: the disk is full, for instance.
        """
        with self._lock:
            folder = self.folder(place)
            if folder.exists() and not overwrite:
                raise ApiError(400, f"there is a checkpoint {place.uri} already; delete it, or choose another name")
            if sum(self.size(one) for one, _ in self.all(place.owner)) + size > self.limit:
                text = f"with {size:,} bytes more, this key's checkpoints exceed {self.limit:,}; delete some"
                raise ApiError(400, text)
            with storing(folder):
                folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                new = Path(tempfile.mkdtemp(prefix=_NEW, dir=folder.parent))
                old = folder.parent / f"{_NEW}old-{new.name}"
                try:
                    write(new)
                    self._write(new, record)
                    if folder.exists():
                        folder.replace(old)  # the rename of a folder replaces none that has files
                    new.replace(folder)
                finally:
                    shutil.rmtree(old, ignore_errors=True)
                    shutil.rmtree(new, ignore_errors=True)

    def set_time(self, place: Place, expires: float | None) -> None:
        """Let a checkpoint expire; None: never. Raises `ApiError` and `StorageError`."""
        with self._lock:
            self._write(self.folder(place), self.record(place).model_copy(update={"expires": expires}))

    def delete(self, place: Place) -> None:
        """Delete a checkpoint, if there is one."""
        with self._lock:
            folder = self.folder(place)
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # there are other checkpoints
                folder.parent.rmdir()
                folder.parent.parent.rmdir()

    def _read(self, place: Place) -> Record | None:
        try:
            return Record.model_validate_json(read_limited(self.folder(place) / _RECORD, _RECORD_BYTES))
        except (OSError, ValidationError, SymbiosisError):
            return None

    def _write(self, folder: Path, record: Record) -> None:
        replace_atomically(folder / _RECORD, lambda path: path.write_text(record.model_dump_json()))
