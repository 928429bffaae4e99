"""Folders that only their owner can change, reached through descriptors.

Another user who can write to a folder can rename everything below it and put something else in its place. A folder is
therefore private only if every folder above it is safe: it belongs to this user or to root, and no other user can write
to it. Sticky folders such as /tmp are an exception, because no user can rename another user's entries in them; the next
folder on the path then has to belong to this user or to root.

The walk from the root opens one folder at a time, follows no link, and keeps descriptors. So the folder that was
checked is the one that is used, even if the path changes afterwards.
"""

import contextlib
import os
import shutil
import stat
from pathlib import Path
from typing import Self

from symbiosis_priv.errors import ConfigError

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
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
        """Open a folder in this one that no other user can write to; `create` makes it, with mode 0700, and it must not
        exist yet. Raises `ConfigError` if it is a link or other users own or can change it, OSError if it cannot be
        made or opened."""
        if create:
            os.mkdir(name, 0o700, dir_fd=self._descriptor)
        try:
            folder = self._child(name)
        except NotADirectoryError as error:
            raise ConfigError(f"{self.path / name} is a link or a file. {self._delete(name)}") from error
        status = os.fstat(folder._descriptor)
        if not _is_own(status) or status.st_mode & _OTHERS_WRITE:
            folder.close()
            raise ConfigError(f"other users can change {folder.path}. {self._delete(name)}")
        return folder

    def open_file(self, name: str) -> int:
        """A descriptor of a file in this folder, to read from. The caller closes it. Raises `ConfigError`: the file is
        not a regular file, belongs to another user, or other users can read or write it; `OSError`: it does not exist,
        is a link, or cannot be opened."""
        descriptor = os.open(name, os.O_RDONLY | _FILE, dir_fd=self._descriptor)
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

    def write(self, name: str, data: bytes) -> None:
        """Write a file that must not exist yet, with mode 0600. Raises OSError if that fails."""
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=self._descriptor)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)

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

    def _delete(self, name: str) -> str:
        return f"Delete {self.path / name}: it is made again"
