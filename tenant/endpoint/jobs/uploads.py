"""The files that clients upload. Each is stored under a generated name, with a small file that describes it."""

import os
import re
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.system.files import UNDECODABLE, PrivateFolder, storing, write_atomically
from tenant.endpoint.api.errors import ApiError

_PIECE = 1 << 20
_NAME_LENGTH = 255
_LINES = re.compile(r"\.(jsonl|ndjson)\Z", re.IGNORECASE)


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A stored file. `filename`: the client's name of it, never used as a path. `created_at`: seconds since 1970."""

    id: str
    filename: str
    bytes: int
    created_at: int


class Files:
    """The files in a private folder. Thread-safe. Limits: bytes of one file, bytes and number of all files."""

    def __init__(self, folder: Path, *, file_limit: int = 128 << 20, limit: int = 4 << 30, count: int = 1000) -> None:
        self.file_limit = file_limit
        self._limit, self._count = limit, count
        self._lock = threading.Lock()
        self._folder = private_folder(folder)
        found = []
        for path in self._folder.glob("file-*.json"):
            with suppress(OSError, *UNDECODABLE):
                file = msgspec.json.decode(path.read_bytes(), type=File)
                found += [file] if file.id == path.stem else []
        self._files = {file.id: file for file in sorted(found, key=lambda file: (file.created_at, file.id))}
        for path in self._folder.iterdir():
            if path.stem not in self._files:  # an upload that was interrupted has left it
                path.unlink()

    def add(self, source: BinaryIO, filename: str) -> File:
        """Store a file. `filename`: the client's name; with the ending .jsonl or .ndjson, the file is JSON lines.
        Raises `ApiError` if the file is empty, or too large; `StorageError` if it cannot be written."""
        name = f"file-{secrets.token_hex(12)}"
        content = self._folder / f"{name}{'.jsonl' if _LINES.search(filename) else '.txt'}"
        try:
            with (
                storing(content),
                os.fdopen(os.open(content, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out,
            ):
                size = 0
                while piece := source.read(_PIECE):
                    size += len(piece)
                    if size > self.file_limit:
                        message = f"the file exceeds {self.file_limit:,} bytes"
                        raise ApiError(413, message, code="too_large", param="file")
                    out.write(piece)
            if not size:
                raise ApiError(400, "the file is empty", param="file")
            last = re.split(r"[/\\]", filename)[-1]
            shown = "".join(char for char in last if char.isprintable())[:_NAME_LENGTH] or "file"
            file = File(id=name, filename=shown, bytes=size, created_at=int(time.time()))
            with self._lock:
                if len(self._files) >= self._count:
                    raise ApiError(413, f"there are {self._count:,} files; delete some", code="too_large")
                if sum(one.bytes for one in self._files.values()) + size > self._limit:
                    raise ApiError(
                        413, f"all files together exceed {self._limit:,} bytes; delete some", code="too_large"
                    )
                write_atomically(self._folder / f"{name}.json", msgspec.json.encode(file), mode=0o600)
                self._files[name] = file
        except BaseException:
            content.unlink(missing_ok=True)
            raise
        return file

    def list(self) -> list[File]:
        """Return all files, the oldest first."""
        with self._lock:
            return list(self._files.values())

    def get(self, name: str, *, param: str | None = None) -> File:
        """Return a file. Raises `ApiError` if there is no file with this name."""
        with self._lock:
            if name not in self._files:
                raise ApiError(404, f"there is no file {name[:80]!a}", code="not_found", param=param)
            return self._files[name]

    def path(self, name: str, *, param: str | None = None) -> Path:
        """Return the path of a file's content. Raises `ApiError` if there is no such file."""
        path = self._folder / f"{self.get(name, param=param).id}.jsonl"
        return path if path.exists() else path.with_suffix(".txt")

    def delete(self, name: str) -> None:
        """Delete a file. Raises `ApiError` if there is no such file."""
        path = self.path(name)
        with self._lock:
            self._files.pop(name, None)
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)


def private_folder(folder: Path) -> Path:
    """Make a folder that no other user can read or change, if it is missing, and return its path. Raises `ConfigError`
    if the folder belongs to another user, or another user could replace it; `StorageError`."""
    with storing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with PrivateFolder.open(folder):
            if folder.stat().st_uid != os.geteuid():
                raise ConfigError(f"{folder} belongs to another user; choose another folder")
            folder.chmod(0o700)
    return folder.resolve()
