"""The bill: what each tenant has used, per day and role. The bill survives any end of this process.

The counts are in one SQLite file in WAL mode. A commit takes eight system calls, so no request waits for one. A request
is counted by one line of an append-only log beside the file, before it is answered. The log is mapped into memory, so
adding a line takes no system call, and the kernel keeps the line when the process is killed: its newline is written
last, and a line without one does not count. Once a second, a thread commits the sums of all new lines, and in the same
transaction up to which byte each log is committed. So every count is in the bill once, whenever the process is killed;
the bill and the tenants' own counts differ by the requests in flight at most. `read` adds the lines that are not
committed, and the next provider that opens the file commits them and removes the log. Every few seconds the file is
flushed to the disk; a power cut loses at most the counts since the last flush.

Counts that cannot be committed (the disk is full or slow, or the file was moved or replaced) stay in the log and are
tried again; `unwritten_s` gives the time since then.
"""

import contextlib
import fcntl
import functools
import glob
import itertools
import mmap
import operator
import os
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, TypeVar, cast

import msgspec

from provider import logs
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.limits import Role
from symbiosis_priv.network.tls import TenantIdentity
from symbiosis_priv.system.files import UNDECODABLE, lock
from symbiosis_priv.system.pacing import Periodic

log = logs.EventLog(__name__)

K = TypeVar("K")

_VERSION = 2  # of the file
_COMMIT_S = 1.0
_FLUSH = 5  # commits before the file is flushed to the disk
_LOCK_S = 0.25  # longest wait for another process that writes
_CLOSE_S = 60.0
_DAY_S = 86_400
_LOG_BYTES = 4 << 20  # some 30,000 lines
_LOG, _OLD_LOG = ".log-", ".counts-"  # parts of the names of logs, and of those of earlier releases
_MOST = (1 << 63) - 1  # the largest sum in SQLite


class UsageCounts(msgspec.Struct, frozen=True):  # ten times faster than a dataclass
    """Counters of a tenant. Bytes are those of payloads."""

    requests: int = 0  # answered products
    rows: int = 0  # multiplied, also for requests that were abandoned, late or failed
    work: int = 0  # multiply-adds for these rows, including the keystream of effects
    bytes_received: int = 0  # of requests, answered or not, and of blocks that helpers sent for the tenant
    bytes_sent: int = 0  # of products, of relayed effects, and of blocks that were handed out
    failed: int = 0  # requests that failed in the provider
    refused: int = 0  # requests
    abandoned: int = 0  # requests whose tenant left before the answer
    slow: int = 0  # connections that were closed because the tenant sent or read too slowly


BilledRole = Role | Literal["none"]  # the role in which a tenant is served; "none" before its hello

COUNTED = UsageCounts.__struct_fields__
_KEY = ("day", "tenant", "authority", "role")
COLUMNS = (*_KEY, *COUNTED)

Key = tuple[str, str, str, str]
Counts = tuple[int, ...]
_Sums = dict[Key, Counts]
_Line = tuple[
    str,
    str,
    str,
    str,
    Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=len(COUNTED), max_length=len(COUNTED))
    ],
]
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Line).decode
_values = msgspec.structs.astuple

_CREATE = f"""
CREATE TABLE IF NOT EXISTS usage (
    day TEXT, tenant TEXT, authority TEXT, role TEXT, {", ".join(f"{name} INTEGER" for name in COUNTED)},
    PRIMARY KEY (day, tenant, authority, role)
) WITHOUT ROWID, STRICT
"""
_CREATE_LOGS = "CREATE TABLE IF NOT EXISTS logs (name TEXT PRIMARY KEY, committed INTEGER) WITHOUT ROWID, STRICT"
_ADD = f"""
INSERT INTO usage VALUES ({", ".join("?" * len(COLUMNS))})
ON CONFLICT DO UPDATE SET
{", ".join(f"{name} = min({name}, {_MOST} - excluded.{name}) + excluded.{name}" for name in COUNTED)}
"""
_COMMITTED = "INSERT OR REPLACE INTO logs VALUES (?, ?)"
_FORGET = "DELETE FROM logs WHERE name = ?"


class _Log:
    """An append-only log of this process beside the database. The process holds a lock on the file. Not thread-safe.
    Raises `OSError` if the file cannot be made."""

    def __init__(self, database: Path) -> None:
        while True:
            self.path = database.with_name(f"{database.name}{_LOG}{secrets.token_hex(8)}")
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX)
                if os.fstat(self._file).st_nlink:  # otherwise a starting provider has taken it for an abandoned log
                    with open(self._file, "wb", closefd=False) as file:
                        file.write(bytes(_LOG_BYTES))  # now, so that a full disk cannot raise SIGBUS later
                    break
            except BaseException:
                self.path.unlink(missing_ok=True)
                os.close(self._file)
                raise
            os.close(self._file)
        self._map = mmap.mmap(self._file, _LOG_BYTES)
        self.size = 0
        self.full = False

    def add(self, line: bytes) -> None:
        """Add a line, or mark the log as full."""
        end = self.size + len(line)
        if end >= _LOG_BYTES:
            self.full = True
            return
        self._map[self.size : end] = line
        self._map[end] = 10  # the line counts from now on
        self.size = end + 1

    def close(self, *, remove: bool) -> None:
        self._map.close()
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


class UsageCounters:
    """The counters of one provider. Thread-safe. The file `database` is made if it does not exist; without one, counts
    are in memory only. Several providers may share a file, which then holds their sums. Raises `ConfigError`: the file
    cannot be written, is damaged, or belongs to another release; or a file beside it belongs to another user or to an
    earlier release."""

    def __init__(self, database: Path | None) -> None:
        self._database = database
        self._logs: list[_Log] = []  # lines go to the last one
        # since the last attempt to commit: how often the same was counted, and its line
        self._new: dict[tuple[str, str, str, str, UsageCounts], tuple[int, bytes]] = {}
        self._uncommitted: _Sums = {}  # of earlier attempts
        self._totals: dict[tuple[str, ...], Counts] = {}  # since the start, without `_new`
        self._failing_since: float | None = None
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._connection = _open(database)
        try:
            if database is not None:
                self._identity = _identity(database)
                self._take_over(database)
                self._logs.append(_Log(database))
        except (sqlite3.Error, OSError) as error:
            self._connection.close()
            raise _unusable(database, error) from error
        turns = itertools.cycle([*(_FLUSH - 1) * [self.settle], self.flush])
        self._flusher = Periodic(lambda: next(turns)(), every_s=_COMMIT_S, name="usage")
        self._flusher.start()

    def count(self, tenant: TenantIdentity, role: BilledRole, counts: UsageCounts) -> None:
        """Add to a tenant's counters. The counts survive the end of this process."""
        key = (_day(int(time.time() // _DAY_S)), tenant.name, tenant.authority, role, counts)
        with self._lock:
            times, line = self._new.get(key) or (0, _encode((*key[:-1], _values(counts))))
            self._new[key] = times + 1, line
            if self._logs:
                self._logs[-1].add(line)

    def settle(self) -> None:
        """Commit all earlier counts to the file. Waits for another process for 0.25 s at most."""
        with self._writing:
            try:
                self._commit()
                self._failing_since = None
                while len(self._logs) > 1:
                    self._remove(self._logs.pop(0))
                self._renew_log()
            except (sqlite3.Error, OSError) as error:  # for example a full disk: keep serving, and warn the operator
                log.often("usage_not_counted", error=type(error).__name__)
                self._failing_since = self._failing_since or time.monotonic()
                with contextlib.suppress(OSError):
                    self._renew_log()

    def _commit(self) -> None:
        with self._lock:
            for key, counts in self._new_sums():
                _add(self._uncommitted, key, counts)
                _add(self._totals, key[1:], counts)
            self._new = {}
            sizes = [(each.path.name, each.size) for each in self._logs]
        if self._uncommitted:
            if self._database is not None and _identity(self._database) != self._identity:
                log.often("usage_database_gone", path=str(self._database))
                raise FileNotFoundError(self._database)  # SQLite would write to the file that was opened
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.executemany(_ADD, _rows(self._uncommitted))
                self._connection.executemany(_COMMITTED, sizes)
            self._uncommitted = {}

    def _new_sums(self) -> Iterator[tuple[Key, Counts]]:
        for (*key, counts), (times, _) in self._new.items():
            yield cast("Key", tuple(key)), tuple(times * count for count in _values(counts))

    def flush(self) -> None:
        """Commit all counts, and flush the file to the disk."""
        self.settle()
        with self._writing, contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    @property
    def unwritten_s(self) -> float:
        """Seconds for which counts could not be written; 0.0 if all counts are written."""
        since = self._failing_since
        return 0.0 if since is None else time.monotonic() - since

    def totals(self) -> dict[tuple[TenantIdentity, BilledRole], UsageCounts]:
        """The counts since this process started."""
        with self._lock:
            sums = dict(self._totals)
            for key, counts in self._new_sums():
                _add(sums, key[1:], counts)
        return {
            (TenantIdentity(name, authority=authority), cast("BilledRole", role)): UsageCounts(*counts)
            for (name, authority, role), counts in sums.items()
        }

    def close(self) -> None:
        """Write all counts to the disk, and close the file. If that fails, the logs stay for the next provider."""
        self._flusher.close(_CLOSE_S)
        self.flush()
        with self._writing, self._lock:
            for each in self._logs:
                if self._failing_since is None:
                    self._remove(each)
                else:
                    each.close(remove=False)
            self._logs = []
            self._connection.close()  # the last connection also checkpoints

    def _take_over(self, database: Path) -> None:
        """Commit the lines in logs of providers that were killed."""
        for path in _logs_of(database):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                if not lock(file.fileno()):
                    continue  # its provider is running
                sums, size, _ = _lines(file.read(), _committed(self._connection, path.name))
                with self._connection:
                    self._connection.execute("BEGIN IMMEDIATE")
                    self._connection.executemany(_ADD, _rows(sums))
                    self._connection.execute(_COMMITTED, (path.name, size))
                path.unlink()
        for (name,) in self._connection.execute("SELECT name FROM logs").fetchall():
            if not database.with_name(name).exists():
                self._connection.execute(_FORGET, (name,))

    def _renew_log(self) -> None:
        """Begin another log if the last one is full. Until then, lines are in memory only."""
        if self._database is not None and self._logs[-1].full:
            new = _Log(self._database)
            with self._lock:
                self._logs.append(new)

    def _remove(self, each: _Log) -> None:
        """Remove a committed log, and its record in the database."""
        each.close(remove=True)
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute(_FORGET, (each.path.name,))


def read(
    database: Path, *, since: str = "", damaged: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, str | int]]:
    """Read the bill by day, tenant and role, from the day `since` (2026-01-31) on. Works while a provider writes the
    file. `damaged` is called with a message for every log with damaged lines, whose counts are not in the bill. Raises
    `ConfigError`: the file does not exist, is damaged or is not a usage database; or a file beside it belongs to
    another user or to an earlier release."""
    found = {}
    for path in _logs_of(database):
        with contextlib.suppress(FileNotFoundError):  # its owner has just removed it
            found[path] = path.read_bytes()  # before the database, which then has at least what it is recorded to have
    try:
        uri = f"{database.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.execute("BEGIN")
            sums: _Sums = {row[: len(_KEY)]: row[len(_KEY) :] for row in connection.execute("SELECT * FROM usage")}
            for path, data in found.items():
                new, _, wrong = _lines(data, _committed(connection, path.name))
                if wrong:
                    damaged(f"{path}: {wrong} damaged lines, whose counts are not in the bill")
                for key, counts in new.items():
                    _add(sums, key, counts)
    except sqlite3.Error as error:
        raise ConfigError(f"{database} is not a provider's usage database ({error}); check [usage] database") from error
    yield from (dict(zip(COLUMNS, row, strict=True)) for row in sorted(_rows(sums)) if str(row[0]) >= since)


@functools.lru_cache(1)
def _day(number: int) -> str:
    return datetime.fromtimestamp(number * _DAY_S, UTC).strftime("%Y-%m-%d")


def _add(sums: dict[K, Counts], key: K, counts: Counts) -> None:
    before = sums.get(key)
    sums[key] = counts if before is None else tuple(map(operator.add, before, counts))


def _rows(sums: _Sums) -> list[tuple[str | int, ...]]:
    return [(*key, *(min(count, _MOST) for count in counts)) for key, counts in sums.items()]


def _lines(data: bytes, start: int) -> tuple[_Sums, int, int]:
    """The sums of the lines of a log from byte `start`, the end of the last whole line, and the number of lines that
    are damaged, by a power cut or a bad disk."""
    end, sums, wrong = data.rfind(b"\n") + 1, _Sums(), 0
    for line in data[start:end].splitlines():
        try:
            day, tenant, authority, role, counts = _decode(line)
        except UNDECODABLE:
            wrong += 1
        else:
            _add(sums, (day, tenant, authority, role), counts)
    return sums, max(start, end), wrong


def _committed(connection: sqlite3.Connection, name: str) -> int:
    """The byte up to which a log is committed."""
    found = connection.execute("SELECT committed FROM logs WHERE name = ?", (name,)).fetchone()
    return 0 if found is None else int(found[0])


def _open(database: Path | None) -> sqlite3.Connection:
    connection = None
    try:
        if database is not None:  # for this user only; SQLite gives its other files the same mode
            _logs_of(database)
            with contextlib.suppress(FileExistsError):  # closing a file that SQLite has open would drop SQLite's locks
                os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(
            database or ":memory:", isolation_level=None, check_same_thread=False, timeout=_LOCK_S
        )
        run = connection.execute
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        run("PRAGMA wal_autocheckpoint = 0")  # not while a tenant waits
        (version,) = run("PRAGMA user_version").fetchone()
        run(_CREATE)
        run(_CREATE_LOGS)
        if version > _VERSION or tuple(name for _, name, *_ in run("PRAGMA table_info(usage)")) != COLUMNS:
            raise sqlite3.DatabaseError("the file belongs to another release")
        run(f"PRAGMA user_version = {_VERSION}")  # a write, to notice a full disk now
        if run("PRAGMA quick_check(1)").fetchall() != [("ok",)]:
            raise sqlite3.DatabaseError("the file is damaged")
    except (sqlite3.Error, OSError) as error:
        if connection is not None:
            connection.close()
        raise _unusable(database, error) from error
    return connection


def _unusable(database: Path | None, error: Exception) -> ConfigError:
    return ConfigError(
        f"[usage] database = {database}: {error}; free disk space and allow writing, restore the file from a copy, or "
        f"choose another file"
    )


def _identity(database: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None if it does not exist."""
    with contextlib.suppress(OSError):
        status = database.stat()
        return status.st_dev, status.st_ino
    return None


def _logs_of(database: Path) -> list[Path]:
    """The logs of all providers that share a database. Raises `ConfigError` if a file beside it could carry forged
    counts, or counts of an earlier release."""
    owners = {0, os.geteuid()}
    with contextlib.suppress(OSError):
        owners.add(database.stat().st_uid)
    found = []
    for path in sorted(database.parent.glob(f"{glob.escape(database.name)}[-.]*")):
        with contextlib.suppress(FileNotFoundError):  # its owner has just removed it
            status = path.lstat()
            end = path.name.removeprefix(database.name)
            if end.startswith(_OLD_LOG):
                raise ConfigError(
                    f"[usage] database = {database}: {path} has counts of an earlier release, which was killed. Start "
                    f"that release once and stop it with SIGTERM, so that it commits them; or delete the file"
                )
            if not end.startswith((_LOG, "-wal", "-shm", "-journal")):
                continue
            if status.st_uid not in owners or not stat.S_ISREG(status.st_mode):
                raise ConfigError(
                    f"[usage] database = {database}: {path} belongs to another user, or is no regular file; delete it, "
                    f"or choose a file in a folder to which only this user can write"
                )
            if end.startswith(_LOG):
                found.append(path)
    return found
