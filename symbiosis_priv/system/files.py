"""Files on this machine: the cache folder, size limits for reading, and atomic writes."""

import errno
import io
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from safetensors import SafetensorError

from symbiosis_priv.errors import ConfigError, StorageError

_PIECE = 1 << 16
UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for malformed input: a DecodeError for wrong types, Python's own errors for bad UTF-8 and
deep nesting."""


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
    """Read a UTF-8 text file, without the byte order mark that some editors write. Raises `ConfigError`: the file
    cannot be read, or is not UTF-8."""
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


def replace_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Replace a file (or an empty folder). A reader sees the old one or the complete new one.

    Only the owner can change the new file, whatever the umask: some of these files are mapped into memory, and
    truncating a mapped file would end the process.

    Raises:
        StorageError: the file could not be written.
    """
    with storing(path):
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            partial = Path(folder) / path.name
            write(partial)
            partial.chmod(partial.stat().st_mode & ~0o022)
            partial.replace(path)


def output_file(path: Path | None) -> Path | None:
    """Check early that the file of an option can be written. Returns it, or the target if it is a link.

    Raises:
        ConfigError: the path is a folder or a device. Replacing `/dev/null` with a file would break other programs.
        StorageError: nothing can be written there.
    """
    if path is None:
        return None
    if path.is_symlink():
        path = path.resolve()
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a file; name one to write to")
    with storing(path):
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent):
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


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file so that readers see the old one or the whole new one, with permission bits `mode` from the start."""

    def write(partial: Path) -> None:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # without it, a power failure could keep the name and lose the content

    replace_atomically(path, write)
