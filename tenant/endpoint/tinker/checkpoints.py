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
from pathlib import Path
from typing import NamedTuple

import msgspec

from symbiosis_priv.errors import ConfigError, SymbiosisError
from symbiosis_priv.system.files import lock, read_limited, storing, write_new
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


class Lora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter of a training client, as the client has asked for it."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is stored with a checkpoint. Times are seconds since 1970. `snapshot`: it ends with its session."""

    base_model: str
    lora: Lora
    time: float
    expires: float | None = None
    optimizer: bool = False
    snapshot: bool = False
    metadata: dict[str, str] | None = None


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
    def id(self) -> str:
        return f"{self.kind}/{self.name}"


class Checkpoints:
    """The checkpoints below one folder, which one process uses at a time.

    Args:
        limit: bytes of all checkpoints; None for half of what the disk has free, with them.
        owners: number of keys. With several, an owner's checkpoints may take at most as much as then stays free.

    Raises:
        ConfigError: another process uses the folder.
        StorageError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, owners: int, limit: int | None = None) -> None:
        self._folder, self._owners = folder, owners
        self._lock = threading.RLock()
        with storing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        if not lock(self._descriptor):
            os.close(self._descriptor)
            raise ConfigError(f"--tinker {folder}: another process uses this folder; choose another one")
        for left in folder.glob(f"*/*/*/{_NEW}*"):
            shutil.rmtree(left, ignore_errors=True)
        for place, record in list(self._all()):
            if record.snapshot:
                self.delete(place)
        used = sum(self.size(place) for place, _ in self._all())
        self._limit = (shutil.disk_usage(folder).free + used) // 2 if limit is None else limit

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
        scheme, _, rest = uri.partition("://")
        parts = rest.split("/")
        if scheme != "tinker" or len(parts) != 3:
            raise ApiError(400, "write a checkpoint as tinker://RUN/weights/NAME", param="path")
        return self.place(owner, *parts)

    def folder(self, place: Place) -> Path:
        return self._folder.joinpath(*place)

    def record(self, place: Place, *, expired: bool = False) -> Record:
        """Read the record of a checkpoint. Raises `ApiError` if there is none, or its time is over and not
        `expired`."""
        with self._lock:
            found = self._read(place)
            if found is None or (not expired and found.expires is not None and found.expires <= time.time()):
                raise ApiError(404, f"there is no checkpoint {place.uri}", code="not_found", param="path")
            return found

    def size(self, place: Place) -> int:
        with os.scandir(self.folder(place)) as files:
            return sum(one.stat(follow_symlinks=False).st_size for one in files)

    def all(self, owner: str, run: str | None = None) -> list[tuple[Place, Record]]:
        """Return the checkpoints of an owner, the newest one first, without snapshots."""
        with self._lock:
            now = time.time()
            found = [
                (place, record)
                for place, record in self._all(owner)
                if not record.snapshot
                and (run is None or place.run == run)
                and (record.expires is None or record.expires > now)
            ]
        return sorted(found, key=lambda one: one[1].time, reverse=True)

    def save(
        self, place: Place, record: Record, write: Callable[[Path], object], *, size: int, overwrite: bool = False
    ) -> None:
        """Write a checkpoint. `write`: writes the files into a new folder, about `size` bytes.

        Raises:
            ApiError: there is one of this name, or the disk's limit is reached.
            StorageError: the disk is full, for instance.
        """
        with self._lock:
            folder = self.folder(place)
            if folder.exists() and not overwrite:
                raise ApiError(400, f"there is a checkpoint {place.uri} already; delete it, or choose another name")
            self._make_room(place, size)
            with storing(folder):
                folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                new = Path(tempfile.mkdtemp(prefix=_NEW, dir=folder.parent))
                try:
                    write(new)
                    write_new(new / _RECORD, msgspec.json.encode(record), mode=0o600)
                    if folder.exists():
                        folder.replace(new / "old")  # the rename of a folder replaces none that has files
                        (new / "old").replace(folder.parent / f"{_NEW}old-{new.name}")
                    new.replace(folder)
                finally:
                    shutil.rmtree(folder.parent / f"{_NEW}old-{new.name}", ignore_errors=True)
                    shutil.rmtree(new, ignore_errors=True)

    def set_time(self, place: Place, seconds: int | None) -> None:
        """Let a checkpoint expire in `seconds`; None: never. Raises `ApiError` and `StorageError`."""
        with self._lock:
            record = self.record(place)
            path = self.folder(place) / _RECORD
            changed = msgspec.structs.replace(record, expires=None if seconds is None else time.time() + seconds)
            with storing(path):
                write_new(new := path.with_name(f"{_NEW}record"), msgspec.json.encode(changed), mode=0o600)
                new.replace(path)

    def delete(self, place: Place) -> None:
        """Delete a checkpoint, if there is one."""
        with self._lock:
            shutil.rmtree(self.folder(place), ignore_errors=True)
            for empty in (self.folder(place).parent, self.folder(place).parent.parent):
                try:
                    empty.rmdir()
                except OSError:  # it has other checkpoints
                    return

    def expired(self) -> list[Place]:
        """Return the checkpoints whose time is over."""
        now = time.time()
        with self._lock:
            return [place for place, record in self._all() if record.expires is not None and record.expires <= now]

    def _make_room(self, place: Place, size: int) -> None:
        used: dict[str, int] = {}
        for one, _ in self._all():
            used[one.owner] = used.get(one.owner, 0) + self.size(one)
        free = self._limit - sum(used.values()) - size
        if free < 0 or (self._owners > 1 and used.get(place.owner, 0) + size > free):
            raise ApiError(
                400,
                f"a checkpoint of {size:,} bytes exceeds this key's share of the {self._limit:,} bytes for them, "
                "half of what the disk had free; delete some",
            )

    def _all(self, owner: str | None = None) -> Iterator[tuple[Place, Record]]:
        for path in self._folder.glob(f"{owner or '*'}/*/*/*"):
            place = Place(*path.relative_to(self._folder).parts)
            if not place.name.startswith(_NEW) and (record := self._read(place)) is not None:
                yield place, record

    def _read(self, place: Place) -> Record | None:
        try:
            content = read_limited(self.folder(place) / _RECORD, _RECORD_BYTES)
            return msgspec.json.decode(content, type=Record)
        except (OSError, msgspec.MsgspecError, SymbiosisError):
            return None
