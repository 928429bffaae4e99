"""Checkpoints on disk: FOLDER/owner/run/kind/name is a PEFT folder, with a record, and perhaps an optimizer's state.

The owner is a digest of a key, and the other parts have the form of `_URI`, so no path leads out of FOLDER. A folder is
written beside its place and renamed, so a checkpoint is whole or absent, and those who read one need not wait for those
who write another.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from tinker import types

from symbiosis_priv.errors import StorageError, SymbiosisError
from symbiosis_priv.system.files import read_limited, storing
from tenant.endpoint.api.errors import ApiError, public, refused
from tenant.endpoint.api.service import OWNED
from tenant.tasks import Tasks
from tenant.tasks.adapter import CONFIG, TENSORS

WEIGHTS, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
SNAPSHOTS = "snapshots"
"""The kind of what is saved without a name. It ends with its training client, and clients cannot name it."""
OPTIMIZER = "optimizer.safetensors"
FILES = (CONFIG, TENSORS)
"""What makes a PEFT folder, and what clients may download."""
_TYPES: dict[str, types.CheckpointType] = {WEIGHTS: "training", SAMPLER: "sampler", EXTERNAL: "external"}
_URI = re.compile(
    rf"tinker://([0-9a-f]{{32}}:train:[0-9]{{1,9}})/({'|'.join(_TYPES)})/([A-Za-z0-9][A-Za-z0-9._-]{{0,63}})"
)
_RECORD, _NEW = "checkpoint.json", ".new-"
_RECORD_BYTES = 64 << 10
_SNAPSHOTS = 8  # of one training client; the oldest ones are deleted


class Record(types.Checkpoint):  # type: ignore[misc]
    """What is stored with a checkpoint, and listed."""

    size_bytes: int
    base_model: str
    lora: types.LoraConfig


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
        for left in (*folder.glob(f"*/*:train:*/*/{_NEW}*"), *folder.glob(f"*/*:train:*/{SNAPSHOTS}")):
            shutil.rmtree(left, ignore_errors=True)
        self.limit = (shutil.disk_usage(folder).free + self._used("*")) // 2 // owners

    def owner(self, client: str) -> str:
        return "own" if self._one else client

    def place(self, client: str, uri: str) -> Place:
        """Return the place of `tinker://run/kind/name`. Raises `ApiError`."""
        if (found := _URI.fullmatch(uri)) is None:
            text = (
                f"write a checkpoint as tinker://RUN/KIND/NAME; the kinds are {', '.join(_TYPES)}, and names have up to"
            )
            raise ApiError(400, f"{text} 64 of A-Z a-z 0-9 . _ -, and begin with a letter or digit", param="path")
        return Place(self.owner(client), *found.groups())

    def folder(self, place: Place) -> Path:
        return self._folder.joinpath(*place)

    def record(self, place: Place) -> Record:
        """Read what is stored with a checkpoint. Raises `ApiError` if there is none. One whose time is over is deleted,
        unless samples use it."""
        with suppress(OSError, ValidationError, ApiError):
            found: Record = Record.model_validate_json(read_limited(self.folder(place) / _RECORD, _RECORD_BYTES))
            if found.expires_at is None or found.expires_at > datetime.now(UTC):
                return found
            self.delete(place)
        raise ApiError(404, f"there is no checkpoint {place.uri}", code="not_found", param="path")

    def all(self, owner: str) -> Iterator[tuple[Place, Record]]:
        """The checkpoints of an owner, snapshots too."""
        for path in self._folder.glob(f"{owner}/*:train:*/*/[!.]*"):
            with suppress(ApiError):
                yield (place := Place(*path.relative_to(self._folder).parts)), self.record(place)

    def listed(self, client: str, run: str | None = None) -> list[Record]:
        """Return the checkpoints of a key, or of one of its runs, the newest one first."""
        every = self.all(self.owner(client))
        found = [record for place, record in every if place.kind != SNAPSHOTS and run in (None, place.run)]
        return sorted(found, key=lambda one: one.time, reverse=True)

    def save(self, place: Place, write: Callable[[Path], object], size: int, **about: Any) -> None:
        """Write a checkpoint. `write`: writes the files into a new folder. `size`: bytes of its tensors. `about`: the
        model, the adapter, and when it expires. Raises `ApiError`: there is one of this name; or, with status 507, the
        owner's part of the disk is used up, or the disk is full."""
        folder = self.folder(place)
        if folder.exists():
            raise ApiError(400, f"there is a checkpoint {place.uri} already; delete it, or choose another name")
        if size + self._used(place.owner) > self.limit:
            raise ApiError(507, f"this key's checkpoints would exceed {self.limit:,} bytes; delete some")
        id, kind = f"{place.kind}/{place.name}", _TYPES.get(place.kind, "sampler")
        try:
            with storing(folder):
                folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(prefix=_NEW, dir=folder.parent, ignore_cleanup_errors=True) as new:
                    write(Path(new))
                    about["size_bytes"] = sum(file.stat().st_size for file in Path(new).iterdir())
                    time = datetime.now(UTC)
                    record = Record(checkpoint_id=id, checkpoint_type=kind, tinker_path=place.uri, time=time, **about)
                    Path(new, _RECORD).write_text(record.model_dump_json())
                    Path(new).rename(folder)
        except StorageError as error:
            text = f"{public(str(error))}; this training client and other checkpoints are as before"
            raise ApiError(507, text) from error
        if place.kind == SNAPSHOTS:
            self.forget_snapshots(place.owner, place.run, keep=_SNAPSHOTS)

    def forget_snapshots(self, owner: str, run: str, *, keep: int) -> None:
        """Delete all snapshots of a training client but the newest ones, and those from which samples come now."""
        every = self.all(owner)
        found = [(record.time, place) for place, record in every if (place.run, place.kind) == (run, SNAPSHOTS)]
        for _, old in sorted(found, reverse=True)[keep:]:
            with suppress(ApiError):
                self.delete(old)

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

    def _used(self, owner: str) -> int:
        return sum(record.size_bytes for _, record in self.all(owner))
