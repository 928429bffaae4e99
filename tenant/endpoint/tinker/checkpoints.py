"""Checkpoints on disk: FOLDER/owner/run/kind/name is a PEFT folder, with a record, and perhaps an optimizer's state.

Every part of a path is checked before it is joined to FOLDER: the owner is a digest, runs have the form that this
endpoint gives them, kinds are three words, and names are those of tasks (`check_name`), which have no separator and
begin with no dot. A folder is written beside its place and renamed, so a checkpoint is whole or absent, and those who
read one need not wait for those who write another.
"""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ValidationError
from tinker import types

from symbiosis_priv.errors import ConfigError, StorageError, SymbiosisError
from symbiosis_priv.system.files import read_limited, storing
from tenant.endpoint.api.errors import ApiError, public, refused
from tenant.endpoint.api.service import OWNED
from tenant.tasks import Tasks
from tenant.tasks.adapter import CONFIG, TENSORS, check_name

WEIGHTS, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
SNAPSHOTS = "snapshots"
"""The kind of what is saved without a name. It ends with its training client, and clients cannot name it."""
TYPES: dict[str, types.CheckpointType] = {WEIGHTS: "training", SAMPLER: "sampler", EXTERNAL: "external"}
OPTIMIZER = "optimizer.safetensors"
FILES = (CONFIG, TENSORS)
"""What makes a PEFT folder, and what clients may download."""
_RECORD = "checkpoint.json"
_RECORD_BYTES = 64 << 10
_URI = re.compile("tinker://([^/]+)/([^/]+)/([^/]+)")
_RUN = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}")
_RUNS, _NEW = "*:train:*", ".new-"


class Record(BaseModel, frozen=True):
    """What is stored with a checkpoint. Times are seconds since 1970."""

    base_model: str
    lora: types.LoraConfig
    time: float
    expires: float | None = None


class Place(NamedTuple):
    """The place of a checkpoint."""

    owner: str
    run: str
    kind: str
    name: str

    @property
    def uri(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def task(self) -> str:
        """The name of its task, from which samples come."""
        return f"{OWNED}{sha256('/'.join(self).encode()).hexdigest()[:32]}"


class Checkpoints:
    """The checkpoints below one folder, which one process uses at a time. Together they take at most half of what the
    disk has free at the start, with them, and those of one of `owners` keys an equal part of it. `one`: the key is made
    anew at every start, and its checkpoints have one owner nevertheless."""

    def __init__(self, folder: Path, tasks: Tasks, *, owners: int, one: bool = False) -> None:
        self._folder, self._tasks, self._one = folder, tasks, one
        for left in (*folder.glob(f"*/{_RUNS}/*/{_NEW}*"), *folder.glob(f"*/{_RUNS}/{SNAPSHOTS}")):
            shutil.rmtree(left, ignore_errors=True)
        used = sum(self.size(place) for place, _ in self.all("*"))
        self.limit = (shutil.disk_usage(folder).free + used) // 2 // owners

    def owner(self, client: str) -> str:
        return "own" if self._one else client

    def place(self, client: str, run: str, kind: str, name: str) -> Place:
        """Return a place below the folder. Raises `ApiError` for any other."""
        try:
            if _RUN.fullmatch(run) and kind in TYPES:
                return Place(self.owner(client), run, kind, check_name(name))
        except ConfigError as error:
            raise ApiError(400, f"the name of a checkpoint: {error}", param="path") from None
        raise ApiError(404, "there is no such training run or kind of checkpoint", param="path")

    def parse(self, client: str, uri: str) -> Place:
        """Return the place of `tinker://run/kind/name`. Raises `ApiError`."""
        if (found := _URI.fullmatch(uri)) is None:
            raise ApiError(400, "write a checkpoint as tinker://RUN/weights/NAME", param="path")
        return self.place(client, *found.groups())

    def folder(self, place: Place) -> Path:
        return self._folder.joinpath(*place)

    def record(self, place: Place) -> Record:
        """Read what is stored with a checkpoint. Raises `ApiError` if there is none. One whose time is over is deleted,
        unless samples use it."""
        with suppress(OSError, ValidationError, SymbiosisError):
            found = Record.model_validate_json(read_limited(self.folder(place) / _RECORD, _RECORD_BYTES))
            if found.expires is None or found.expires > time.time():
                return found
            with suppress(ApiError):
                self.delete(place)
        raise ApiError(404, f"there is no checkpoint {place.uri}", code="not_found", param="path")

    def size(self, place: Place) -> int:
        with suppress(OSError), os.scandir(self.folder(place)) as files:  # it may be deleted meanwhile
            return sum(one.stat(follow_symlinks=False).st_size for one in files)
        return 0

    def all(self, owner: str) -> Iterator[tuple[Place, Record]]:
        """The checkpoints of an owner, snapshots too."""
        for path in self._folder.glob(f"{owner}/{_RUNS}/*/[!.]*"):
            with suppress(ApiError):
                yield (place := Place(*path.relative_to(self._folder).parts)), self.record(place)

    def save(self, place: Place, record: Record, write: Callable[[Path], object], *, size: int) -> None:
        """Write a checkpoint. `write`: writes the files into a new folder, about `size` bytes. Raises `ApiError`: there
        is one of this name; or, with status 507, the owner's part of the disk is used up, or the disk is full."""
        folder = self.folder(place)
        if folder.exists():
            raise ApiError(400, f"there is a checkpoint {place.uri} already; delete it, or choose another name")
        if sum(self.size(one) for one, _ in self.all(place.owner)) + size > self.limit:
            raise ApiError(507, f"with {size:,} bytes more, this key's checkpoints exceed {self.limit:,}; delete some")
        try:
            with storing(folder):
                folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(prefix=_NEW, dir=folder.parent, ignore_cleanup_errors=True) as new:
                    write(Path(new))
                    Path(new, _RECORD).write_text(record.model_dump_json())
                    Path(new).rename(folder)
        except StorageError as error:
            text = f"{public(str(error))}; this training client and other checkpoints are as before"
            raise ApiError(507, text) from error

    def delete(self, place: Place) -> None:
        """Delete a checkpoint, if there is one. Raises `ApiError` if samples use it."""
        folder = self.folder(place)
        try:
            if place.task in self._tasks:
                self._tasks.unregister(place.task)
        except SymbiosisError as error:
            raise ApiError(400, f"{place.uri} is in use; delete it later") from error
        with suppress(OSError):  # it is gone, or there are other checkpoints
            with tempfile.TemporaryDirectory(prefix=_NEW, dir=folder.parent) as gone:
                folder.rename(Path(gone) / folder.name)
            folder.parent.rmdir()
            folder.parent.parent.rmdir()

    def task(self, place: Place) -> str:
        """Return the task of a checkpoint, which is registered if it is not. Raises `ApiError` if there is no such
        checkpoint, or its folder is not a PEFT folder."""
        self.record(place)
        if place.task not in self._tasks:
            try:
                self._tasks.register(place.task, self.folder(place), within=self.folder(place))
            except SymbiosisError as error:
                raise refused(error) from error
        return place.task
