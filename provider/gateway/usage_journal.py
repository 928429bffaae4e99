"""Counts in a file that is mapped into memory. Adding to them takes no system call, and they survive a SIGKILL.

Theory of operation. A journal holds what a provider has counted since the journal was made; `usage` adds it to the
database about once a second. The journal has a fixed number of slots, one for each key. A slot holds the totals of its
key twice, and a sequence number whose lowest bit selects the valid totals. `add` writes the other totals, and then the
number with one store. So a process that is killed at any moment leaves either the old or the new totals, and the kernel
keeps the pages. Totals never decrease and slots never move: the database records which totals it has.

The owner holds a lock on the file. A file that can be locked was left by a process that has been killed.
"""

import contextlib
import fcntl
import glob
import mmap
import operator
import os
import secrets
import stat
import struct
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from symbiosis_priv.system.files import UNDECODABLE, lock

_SLOT_BYTES, _SLOTS = 512, 1024
_SIZE = _SLOT_BYTES * _SLOTS
_SEQUENCE = struct.Struct("@q")
_LENGTH = struct.Struct("@q")  # of the key
_MARK = ".counts-"
MOST = (1 << 63) - 1
"""The largest total."""

Key = tuple[str, ...]
Totals = tuple[int, ...]


class Journal:
    """The counts of one process. Not thread-safe.

    Args:
        database: the journal's file lies beside this file; None keeps the counts in memory only.
        fields: number of counters of a key.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, database: Path | None, *, fields: int) -> None:
        self._totals = struct.Struct(f"@{fields}q")
        self._zeros: Totals = (0,) * fields
        self.settled: list[Totals] = []
        """The totals that the database has, by slot."""
        self._slots: dict[Key, int] = {}
        self._current: list[Totals] = []
        self._path: Path | None = None
        self._file = -1
        if database is not None:
            self._path, self._file = _make(database)
        self._map = mmap.mmap(self._file, _SIZE)
        self._words = memoryview(self._map).cast("q")

    @property
    def name(self) -> str:
        """Name of the file, in the folder of the database."""
        return "" if self._path is None else self._path.name

    def add(self, key: Key, counts: Sequence[int]) -> bool:
        """Add to the totals of a key. Returns False if the journal has no slot for the key."""
        slot = self._slots.get(key)
        if slot is None:
            slot, name = len(self._slots), msgspec.msgpack.encode(key)
            where = slot * _SLOT_BYTES + self._head
            if slot == _SLOTS or self._head + len(name) > _SLOT_BYTES:
                return False
            self._map[where : where + len(name)] = name
            _LENGTH.pack_into(self._map, where - _LENGTH.size, len(name))
            self._slots[key] = slot
            self._current.append(self._zeros)
        totals = tuple(map(operator.add, self._current[slot], counts))
        if max(totals) > MOST:
            totals = tuple([min(total, MOST) for total in totals])
        self._current[slot] = totals
        sequence = self._words[slot * _SLOT_BYTES // 8] + 1
        place = _SEQUENCE.size + (sequence & 1) * self._totals.size
        self._totals.pack_into(self._map, slot * _SLOT_BYTES + place, *totals)
        self._words[slot * _SLOT_BYTES // 8] = sequence
        return True

    @property
    def outdated(self) -> bool:
        """True if half of the slots are used, or if the file was deleted."""
        deleted = self._path is not None and not os.fstat(self._file).st_nlink
        return deleted or len(self._slots) > _SLOTS // 2

    def totals(self) -> list[tuple[Key, Totals]]:
        """The keys and their current totals, by slot."""
        return list(zip(self._slots, self._current, strict=True))

    def close(self, *, remove: bool) -> None:
        """Free the memory.

        Args:
            remove: delete the file; otherwise the next provider that opens the database finds it.
        """
        self._words.release()
        self._map.close()
        if self._path is not None:
            if remove:
                self._path.unlink(missing_ok=True)
            os.close(self._file)

    @property
    def _head(self) -> int:
        """Bytes of a slot before its key."""
        return _SEQUENCE.size + 2 * self._totals.size + _LENGTH.size


class JournalReader:
    """The counts in the journal of another process, which may be running.

    Args:
        fields: number of counters of a key.
        owners: user ids that the file may belong to.

    Raises:
        OSError: the file cannot be read, is not a regular file, or belongs to another user.
    """

    def __init__(self, path: Path, *, fields: int, owners: Collection[int]) -> None:
        self.path = path
        self._totals = struct.Struct(f"@{fields}q")
        self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in owners:
            self.close()
            raise FileNotFoundError(path)

    def lock(self) -> bool:
        """Lock the file. Returns False if its owner is running, or if the file is gone."""
        return lock(self._file) and os.fstat(self._file).st_nlink > 0

    def totals(self) -> Iterator[tuple[Key | None, Totals]]:
        """Yield the keys and their totals, by slot. The key of a damaged slot is None."""
        for start in range(0, _SIZE, _SLOT_BYTES):
            slot = self._slot(start)
            sequence = _SEQUENCE.unpack_from(slot)[0] if len(slot) == _SLOT_BYTES else 0
            if not sequence:  # no more slots; after a power cut, the file may be short
                return
            totals = self._totals.unpack_from(slot, _SEQUENCE.size + (sequence & 1) * self._totals.size)
            where = _SEQUENCE.size + 2 * self._totals.size
            (length,) = _LENGTH.unpack_from(slot, where)
            where += _LENGTH.size
            key = None
            with contextlib.suppress(*UNDECODABLE):
                if min(totals) >= 0:
                    key = msgspec.msgpack.decode(slot[where : where + length], type=Key)
            yield key, totals

    def close(self) -> None:
        """Close the file, and release the lock."""
        os.close(self._file)

    def _slot(self, start: int) -> bytes:
        """One slot, with totals that belong together."""
        while True:
            slot = os.pread(self._file, _SLOT_BYTES, start)
            if os.pread(self._file, _SEQUENCE.size, start) == slot[: _SEQUENCE.size]:
                return slot


@contextlib.contextmanager
def journals(database: Path, *, fields: int) -> Iterator[list[JournalReader]]:
    """Open the journals of all providers that share a database. Files that another user has put into the folder are
    ignored: their counts are forged, and nobody else may delete them in a sticky folder."""
    owners = owners_of(database)
    with contextlib.ExitStack() as files:
        readers = []
        for path in sorted(database.parent.glob(f"{glob.escape(database.name)}{_MARK}*")):
            with contextlib.suppress(OSError):  # for example, its owner has just removed it
                readers.append(JournalReader(path, fields=fields, owners=owners))
                files.callback(readers[-1].close)
        yield readers


def owners_of(database: Path) -> set[int]:
    """The user ids to which files of a database may belong: root, this user, and the database's owner."""
    owners = {0, os.geteuid()}
    with contextlib.suppress(OSError):
        owners.add(database.stat().st_uid)
    return owners


def _make(database: Path) -> tuple[Path, int]:
    """Make a locked file of zeros. Written now, so that a full disk cannot raise SIGBUS later."""
    while True:
        path = database.with_name(f"{database.name}{_MARK}{secrets.token_hex(8)}")
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:  # otherwise a starting provider has removed it as an abandoned journal
                with open(file, "wb", closefd=False) as zeros:
                    zeros.write(bytes(_SIZE))
                return path, file
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(file)
            raise
        os.close(file)


def pack(totals: Sequence[Totals]) -> bytes:
    """The totals of all slots, as the database stores them."""
    return msgspec.msgpack.encode(totals)


def unpack(packed: bytes) -> list[Totals]:
    """Inverse of `pack`."""
    return msgspec.msgpack.decode(packed, type=list[Totals])
