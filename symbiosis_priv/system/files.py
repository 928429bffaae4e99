"""Files and folders of this machine: the cache folder, size limits for reading, atomic writes, locks against other
processes, and private folders.

Another user who can write to a folder can rename everything below it and put something else in its place. A folder is
therefore private only if every folder above it is safe: it belongs to this user or to root, and no other user can write
to it. Sticky folders such as /tmp are an exception, because no user can rename another user's entries in them; the next
folder on the path then has to belong to this user or to root.

The walk from the root opens one folder at a time, follows no link, and keeps descriptors. So the folder that was
checked is the one that is used, even if the path changes afterwards.
"""

import contextlib
import errno
import fcntl
import io
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

import msgspec
from safetensors import SafetensorError

from symbiosis_priv.errors import ConfigError, StorageError

_PIECE = 1 << 16
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for malformed input: its own, and those of Python for bad UTF-8 and deep nesting."""


def read_limited(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes. Pipes and devices are refused: they may block or never end. Raises
    `OSError`: the file cannot be read, is not regular, or is larger; its `strerror` says which."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe, a folder or a device and not a file", str(path))
        data = bytearray()
        while piece := os.read(descriptor, _PIECE):
            data += piece
            if len(data) > limit:
                raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", str(path))
    finally:
        os.close(descriptor)
    return bytes(data)


def default_cache() -> Path:
    """The folder for quantised weights and verification keys: `$SYMBIOSIS_PRIV_CACHE` or the user's cache folder."""
    if override := os.environ.get("SYMBIOSIS_PRIV_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "symbiosis-priv"


def read_text(path: Path) -> str:
    """Read a UTF-8 text file, without its byte order mark. Raises `ConfigError`: it cannot be read, or is not UTF-8."""
    try:
        return decode_text(path.read_bytes(), name=str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def decode_text(data: bytes, *, name: str) -> str:
    """Decode UTF-8 without a byte order mark, and turn every line end into a newline. `name` is for messages. Raises
    `ConfigError` if the bytes are not UTF-8."""
    try:
        return io.IncrementalNewlineDecoder(None, translate=True).decode(data.decode("utf-8-sig"), final=True)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text ({error.reason}, byte {error.start}); save it as UTF-8") from error


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn any error while `path` is written into a StorageError that names `path`."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise StorageError(
            f"cannot write {path}: {reason}; make room there, correct its permissions, or choose another folder"
        ) from error


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A temporary folder beside a file that is to be written."""
    with storing(path):
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            yield Path(folder)


def replace_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file (or an empty folder). A reader sees the old one or the complete new one. Only the owner can change
    the new file, whatever the umask: some of these files are mapped into memory, and truncating a mapped file would end
    the process. Raises `StorageError`: the file could not be written."""
    with _beside(path) as folder:
        partial = folder / path.name
        write(partial)
        partial.chmod(partial.stat().st_mode & ~0o022)
        partial.replace(path)


def output_file(path: Path | None) -> Path | None:
    """Check early that the file of an option can be written. Returns it, or the target if it is a link. Raises
    `ConfigError`: the path is a folder or a device (replacing `/dev/null` with a file would break other programs);
    `StorageError`: nothing can be written there."""
    if path is None:
        return None
    if path.is_symlink():
        path = path.resolve()
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a file; name one to write to")
    with _beside(path):
        pass
    return path


def check_unused(folder: Path) -> None:
    """Raise ConfigError if a folder exists and is not empty."""
    if folder.is_symlink() or folder.exists():
        try:
            used = any(folder.iterdir())
        except OSError:  # a file, a dangling link
            used = True
        if used:
            raise ConfigError(f"{folder} is in use; name a new or empty folder")


def write_atomically(path: Path, *parts: bytes | memoryview, mode: int = 0o644) -> None:
    """Write a file so that readers see the old one or the whole new one, with permission bits `mode` from the start."""
    replace_atomically(path, lambda partial: write_new(partial, *parts, mode=mode))


def write_new(path: Path | str, *parts: bytes | memoryview, mode: int, folder: int | None = None) -> None:
    """Write a file that must not exist yet, nor be a link, and remove it after an error. `folder` is an open folder to
    which the path is relative. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, mode, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())  # without it, a power failure could keep the name and lose the content
    except BaseException:
        os.unlink(path, dir_fd=folder)
        raise


_POLL_S: Final = 0.05


def lock(descriptor: int, *, patience_s: float = 0.0) -> bool:
    """Lock an open file or folder. Waits at most `patience_s` seconds for another process that holds the lock. Returns
    False if the other process still holds the lock. Raises `OSError`: the file system has no locks."""
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)


_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_OTHERS_WRITE, _OTHERS = 0o022, 0o077


def _is_own(status: os.stat_result) -> bool:
    """True if a file belongs to this user, or to root, who can change everything anyway."""
    return status.st_uid in (0, os.geteuid())


class PrivateFolder:
    """An open folder that no other user can replace. A context manager. `close` closes the descriptor."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Self:
        """Open a folder whose parents are all safe; `create` makes those that are missing, with mode 0755. Links in
        `path` are followed first, and their target is checked. Raises `ConfigError` if another user could replace the
        folder or something above it, OSError if it cannot be made or opened."""
        path = path.resolve()
        folder = cls(Path(path.anchor), os.open(path.anchor, _FOLDER))
        for name in path.parts[1:]:
            with folder:
                folder._check_safe()
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o755, dir_fd=folder._descriptor)
                folder = folder._child(name)
        try:
            folder._check_safe()
        except ConfigError:
            folder.close()
            raise
        return folder

    def subfolder(self, name: str, *, create: bool = False) -> Self:
        """Open a folder in this one that no other user can write to; `create` makes it, with mode 0700. Raises
        `ConfigError`: it is a link, or others own or can change it; OSError, also if the folder to make exists."""
        if create:
            os.mkdir(name, 0o700, dir_fd=self._descriptor)
        try:
            folder = self._child(name)
        except NotADirectoryError as error:
            raise ConfigError(f"{self.path / name} is a link or a file. Delete it: it is made again") from error
        status = os.fstat(folder._descriptor)
        if not _is_own(status) or status.st_mode & _OTHERS_WRITE:
            folder.close()
            raise ConfigError(f"other users can change {folder.path}. Delete it: it is made again")
        return folder

    def open_file(self, name: str, *, write: bool = False) -> int:
        """A descriptor of a file in this folder, to read from, and to write to if `write`. The caller closes it. Raises
        `ConfigError`: the file is not a regular file, belongs to another user, or other users can read or write it;
        `OSError`: it does not exist, is a link, or cannot be opened."""
        descriptor = os.open(name, (os.O_RDWR if write else os.O_RDONLY) | _FILE, dir_fd=self._descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_own(status) or status.st_mode & _OTHERS:
            os.close(descriptor)
            raise ConfigError(
                f"other users can read or change {self.path / name}. Delete {self.path}: it is made again"
            )
        return descriptor

    def read(self, name: str) -> bytes:
        """The content of a file; raises what `open_file` raises."""
        with os.fdopen(self.open_file(name), "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a file that must not exist yet, with mode 0600. Raises OSError if that fails."""
        write_new(name, data, mode=0o600, folder=self._descriptor)

    def rename(self, name: str, new: str) -> None:
        os.rename(name, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def delete(self, name: str) -> None:
        """Delete a folder in this one with its content. Errors are ignored."""
        shutil.rmtree(name, ignore_errors=True, dir_fd=self._descriptor)

    def lockable(self) -> int:
        """A descriptor of this folder for `fcntl.flock`. The caller closes it."""
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _child(self, name: str) -> Self:
        return type(self)(self.path / name, os.open(name, _FOLDER, dir_fd=self._descriptor))

    def _check_safe(self) -> None:
        """Refuse a folder in which another user could rename or replace this user's entries."""
        status = os.fstat(self._descriptor)
        open_to_others = status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
        if open_to_others or not _is_own(status):
            raise ConfigError(
                f"other users can change {self.path} and replace its content: chown it to this user and "
                f"`chmod go-w` it, or choose another folder (for the cache: RemoteConfig(cache=...), "
                f"SYMBIOSIS_PRIV_CACHE)"
            )
