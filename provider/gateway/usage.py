"""The bill: what each tenant has used, per day and role. The bill survives any end of this process.

The counts are in one SQLite file in WAL mode. A count is committed before its request is answered, so after a SIGKILL
the bill and the tenants' own counts differ by the requests in flight at most. One commit writes the counts of all
threads, so requests that share a product share a commit. A commit writes to the system's cache without waiting for the
disk (15 µs). A thread flushes the file every few seconds; a power cut loses at most the counts since the last flush.

Counts that cannot be written (the disk is full or slow, or another process writes) stay in memory and are tried again;
`unwritten_s` gives the time since then. If the file is deleted, a new one is made within seconds. Nothing is written
to a file that has replaced the first one, or to a damaged file before it is repaired.
"""

import contextlib
import operator
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self

import msgspec

from provider import logs
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.limits import Role
from symbiosis_priv.network.tls import TenantIdentity

log = logs.EventLog(__name__)

_VERSION = 1  # of the file
_FLUSH_S = 5.0
_REST = 20  # the pause between two flushes is at least this many times the duration of a flush
_LOCK_S = 0.25  # longest wait for another process that writes; tenants wait meanwhile
_DAY_S = 86_400


class Counts(msgspec.Struct, frozen=True):  # ten times faster than a dataclass
    """Counters of a tenant.

    Args:
        requests: answered products.
        rows: rows of answered products, and rows of abandoned requests that were multiplied.
        work: multiply-adds for these rows, including the keystream of effects.
        bytes_received: payload bytes of answered requests, and of blocks that helpers sent for the tenant.
        bytes_sent: payload bytes of products, of relayed effects, and of blocks that were handed out.
        failed: requests that failed in the provider.
        refused: requests that were refused.
        abandoned: requests whose tenant left before the answer.
        slow: connections that were closed because the tenant sent or read too slowly.
    """

    requests: int = 0
    rows: int = 0
    work: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    failed: int = 0
    refused: int = 0
    abandoned: int = 0
    slow: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, _values(self), _values(other)))


_NOTHING = Counts()
_ROW_DAMAGE = "value in usage."  # part of SQLite's message for a value of the wrong type; other rows are intact
COUNTED = Counts.__struct_fields__
_values = msgspec.structs.astuple

Served = Role | Literal["none"]
"""The role in which a tenant is served; "none" before its hello."""

COLUMNS = ("day", "tenant", "authority", "role", *COUNTED)

_CREATE = f"""
CREATE TABLE IF NOT EXISTS usage (
    day TEXT, tenant TEXT, authority TEXT, role TEXT, {", ".join(f"{name} INTEGER" for name in COUNTED)},
    PRIMARY KEY (day, tenant, authority, role)
) WITHOUT ROWID, STRICT
"""
_MOST = (1 << 63) - 1  # largest INTEGER


def _sum(name: str) -> str:
    """SQL for a sum that cannot fail: a stored value that is not a count is 0, and the sum is limited to `_MOST`."""
    return f"min(max(coalesce(CAST({name} AS INTEGER), 0), 0), {_MOST} - excluded.{name}) + excluded.{name}"


_ADD = f"""
INSERT INTO usage VALUES ({", ".join("?" * len(COLUMNS))})
ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {_sum(name)}" for name in COUNTED)}
"""


class Usage:
    """The counters of one provider. Thread-safe.

    Args:
        database: a file, made if it does not exist; None counts in memory only. Several providers may share a file,
            which then holds their sums.

    Raises:
        ConfigError: the file cannot be written, is damaged, or belongs to another release.
    """

    def __init__(self, database: Path | None) -> None:
        self._database = database
        self._connection = _open(database)
        self._file = _identity(database)
        self._damaged = False
        self._failing_since: float | None = None
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._pending: dict[tuple[str, str, str, Served], Counts] = {}
        self._totals: dict[tuple[TenantIdentity, Served], Counts] = {}
        self._day = (0, "")
        self._closed = threading.Event()
        self._flusher = threading.Thread(target=self._flush, name="usage", daemon=True)
        self._flusher.start()

    def count(self, tenant: TenantIdentity, role: Served, counts: Counts) -> None:
        """Add to a tenant's counters. The counts survive the end of this process after the next `settle`."""
        with self._lock:
            self._totals[tenant, role] = self._totals.get((tenant, role), _NOTHING) + counts
            key = (self._today(), tenant.name, tenant.authority, role)
            pending = self._pending.get(key)
            self._pending[key] = counts if pending is None else pending + counts

    def settle(self) -> None:
        """Commit all earlier counts, or wait until another thread has. Waits for 0.25 s at most, because another thread
        may be waiting for the database or for a slow disk.
        """
        if not self._writing.acquire(timeout=_LOCK_S):
            with self._lock:
                if self._pending:
                    self._failing_since = self._failing_since or time.monotonic()
            return
        try:
            with self._lock:
                pending, self._pending = self._pending, {}
            if not pending or self._write(pending):
                self._failing_since = None
                return
            self._failing_since = self._failing_since or time.monotonic()
            with self._lock:  # keep the counts for the next commit
                for key, counts in pending.items():
                    self._pending[key] = self._pending.get(key, _NOTHING) + counts
        finally:
            self._writing.release()

    @property
    def unwritten_s(self) -> float:
        """Seconds for which counts could not be written; 0.0 if all counts are written."""
        since = self._failing_since
        return 0.0 if since is None else time.monotonic() - since

    def totals(self) -> dict[tuple[TenantIdentity, Served], Counts]:
        """The counts since this process started."""
        with self._lock:
            return dict(self._totals)

    def close(self) -> None:
        """Write all counts to the disk, and close the file."""
        self._closed.set()
        self._flusher.join()
        self.settle()
        with self._writing:
            self._connection.close()  # the last connection also checkpoints

    def _write(self, counted: dict[tuple[str, str, str, Served], Counts]) -> bool:
        """Returns True if the rows were committed."""
        rows = [(*key, *_values(counts)) for key, counts in counted.items()]
        try:
            if len(rows) == 1:  # one statement is a transaction
                self._connection.execute(_ADD, rows[0])
                return True
            self._connection.execute("BEGIN")
            self._connection.executemany(_ADD, rows)
            self._connection.execute("COMMIT")
            return True
        except sqlite3.Error as error:  # for example a full disk: keep serving, and warn the operator
            log.often("usage_not_counted", error=type(error).__name__)
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            return False

    def _today(self) -> str:
        number = int(time.time() // _DAY_S)
        if number != self._day[0]:
            self._day = (number, datetime.fromtimestamp(number * _DAY_S, UTC).strftime("%Y-%m-%d"))
        return self._day[1]

    def _flush(self) -> None:
        pause = _FLUSH_S
        while not self._closed.wait(pause):
            begun = time.monotonic()
            self.keep()
            pause = max(_FLUSH_S, _REST * (time.monotonic() - begun))  # checking a long bill takes a while

    def keep(self) -> None:
        """Flush the file to the disk. Opens the file again if it was deleted or is damaged."""
        found = _identity(self._database)
        if found != self._file:
            log.often("usage_database_gone", path=str(self._database), replaced=found is not None)
            with self._writing:
                self._connection.close()
                if found is None:
                    with contextlib.suppress(ConfigError):
                        self._connection, self._file = _open(self._database), _identity(self._database)
        elif self._damaged or _is_damaged(self._database):
            log.often("usage_database_damaged", path=str(self._database))
            with self._writing:
                self._damaged = True
                self._connection.close()  # closing may repair the file: the newer pages are in the WAL file
                with contextlib.suppress(ConfigError):
                    self._connection, self._damaged = _open(self._database), False
        self.settle()
        with self._writing, contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")


def _open(database: Path | None) -> sqlite3.Connection:
    try:
        if database is not None:  # for this user only; SQLite gives its other files the same mode
            with contextlib.suppress(FileExistsError):  # closing a file that SQLite has open would drop SQLite's locks
                os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(
            database or ":memory:", isolation_level=None, check_same_thread=False, timeout=_LOCK_S
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # not while a tenant waits
        connection.execute(_CREATE)
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        columns = tuple(name for _, name, *_ in connection.execute("PRAGMA table_info(usage)"))
        if version > _VERSION or columns != COLUMNS:
            raise sqlite3.DatabaseError("the file belongs to another release")
        connection.execute(f"PRAGMA user_version = {_VERSION}")  # a write, to notice a full disk now
        if _is_damaged(database):  # now, because the descriptor of this check stays open as long as `connection`
            raise sqlite3.DatabaseError("the file is damaged")
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(
            f"[usage] database = {database}: {error}; free disk space and allow writing, or choose another file"
        ) from error
    return connection


def _is_damaged(database: Path | None) -> bool:
    """True if a new connection cannot read the file. (An open connection may read old pages from its memory.)"""
    try:
        with contextlib.closing(sqlite3.connect(database or ":memory:", timeout=_LOCK_S)) as connection:
            found = (message for (message,) in connection.execute("PRAGMA quick_check"))
            return any(message != "ok" and _ROW_DAMAGE not in message for message in found)
    except sqlite3.Error as error:
        return getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


def _identity(database: Path | None) -> tuple[int, int] | None:
    """Device and inode of a file; None if it does not exist."""
    with contextlib.suppress(OSError):
        if database is not None:
            status = database.stat()
            return status.st_dev, status.st_ino
    return None


def read(
    database: Path, *, since: str = "", damaged: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, str | int]]:
    """Read the bill by day, tenant and role. Works while a provider writes the file.

    Args:
        database: usage database of a provider.
        since: the first day, for example 2026-01-31.
        damaged: called with a message for every row with a value that is not a count or not text. A damaged count is 0
            in the bill; invalid characters are replaced.

    Raises:
        ConfigError: the file does not exist or is not a usage database.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            query = f"SELECT {', '.join(COLUMNS)} FROM usage WHERE day >= ? ORDER BY day, tenant, authority, role"
            connection.text_factory = lambda text: text.decode(errors="replace")
            for values in connection.execute(query, (since,)):
                row = dict(zip(COLUMNS, values, strict=True))
                wrong = [name for name in COUNTED if not isinstance(row[name], int) or row[name] < 0]
                wrong += [name for name in COLUMNS if name not in COUNTED and "\ufffd" in row[name]]
                if wrong:
                    damaged(f"{row['day']}, {row['tenant']}, {row['role']}: damaged values of {', '.join(wrong)}")
                yield row | {name: 0 for name in wrong if name in COUNTED}
    except sqlite3.Error as error:
        raise ConfigError(f"{database} is not a provider's usage database ({error}); check [usage] database") from error
