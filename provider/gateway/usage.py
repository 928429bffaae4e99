"""What each tenant has used, per day and role: a bill that survives any end of this process.

One SQLite file, written ahead. Every count is committed before its request is answered, so that after a SIGKILL the
bill differs from what tenants have counted by the requests in flight at most. Whoever commits does it for all who have
counted by then: requests that shared a product share a commit. It is a write to the system's cache, without waiting
for a disk (15 µs); a thread brings it to the disk every few seconds, which is what a power cut may cost.

What cannot be written, to a full disk for instance, or not at once, because somebody else writes or the disk is slow to
take it, is kept and tried again, and `unwritten_s` says for how long. A file that was deleted is made again within
seconds; into one that was put in its place nothing is written, nor into one that somebody has damaged until it is
whole again.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from provider import logs
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.limits import Role
from symbiosis_priv.network.tls import TenantIdentity

log = logs.EventLog(__name__)

_VERSION = 1  # of the file
_FLUSH_S = 5.0
_REST = 20  # times what it took, at least, before the next time
_LOCK_S = 0.25  # for another process that writes: tenants wait for it
_DAY_S = 86_400


class Counts(msgspec.Struct, frozen=True):  # is made and added up in a tenth of a dataclass's time
    """What is counted; all but the last four are of products that were answered.

    Args:
        requests: products.
        rows: of them, and those of abandoned requests that had been multiplied.
        work: multiply-adds for these rows, the keystream of effects included.
        bytes_received: payloads from the tenant.
        bytes_sent: products to it.
        failed: requests that broke here.
        refused: requests that it may not make, or not so many.
        abandoned: requests whose tenant left before the answer.
        slow: connections that were closed because bytes came or went too slowly.
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

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, _values(self), _values(other)))


_NOTHING = Counts()
_ROW_DAMAGE = "value in usage."  # in SQLite's words for a value of the wrong type: the other rows are whole
COUNTED = Counts.__struct_fields__
_values = msgspec.structs.astuple

Served = Role | Literal["none"]
"""In which role a tenant is served: in none before it has said hello."""

COLUMNS = ("day", "tenant", "authority", "role", *COUNTED)

_CREATE = f"""
CREATE TABLE IF NOT EXISTS usage (
    day TEXT, tenant TEXT, authority TEXT, role TEXT, {", ".join(f"{name} INTEGER" for name in COUNTED)},
    PRIMARY KEY (day, tenant, authority, role)
) WITHOUT ROWID, STRICT
"""
_MOST = (1 << 63) - 1  # of an INTEGER


def _sum(name: str) -> str:
    """A sum that no stored value makes fail: what is no count counts as 0, and a column that is full stays so."""
    return f"min(max(coalesce(CAST({name} AS INTEGER), 0), 0), {_MOST} - excluded.{name}) + excluded.{name}"


_ADD = f"""
INSERT INTO usage VALUES ({", ".join("?" * len(COLUMNS))})
ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {_sum(name)}" for name in COUNTED)}
"""


class Usage:
    """The counters of one provider. Thread-safe.

    Args:
        database: a file, made if there is none; None counts in memory only. Several providers may share one: it holds
            what they have served together.

    Raises:
        ConfigError: it cannot be written, is damaged, or another release's.
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
        """Add to a tenant's counters; durable over the end of this process after the next `settle`."""
        with self._lock:
            self._totals[tenant, role] = self._totals.get((tenant, role), _NOTHING) + counts
            key = (self._today(), tenant.name, tenant.authority, role)
            self._pending[key] = self._pending.get(key, _NOTHING) + counts

    def settle(self) -> None:
        """Make everything durable that has been counted before; returns when it is, whoever did it, or after a moment:
        nobody waits behind others who wait for the database, or for as long as it is brought to a slow disk.
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
            with self._lock:  # for the next time
                for key, counts in pending.items():
                    self._pending[key] = self._pending.get(key, _NOTHING) + counts
        finally:
            self._writing.release()

    @property
    def unwritten_s(self) -> float:
        """For how long something that was counted could not be written; 0 if all of it is."""
        since = self._failing_since
        return 0.0 if since is None else time.monotonic() - since

    def totals(self) -> dict[tuple[TenantIdentity, Served], Counts]:
        """What has been counted since this process started."""
        with self._lock:
            return dict(self._totals)

    def close(self) -> None:
        """Bring everything to the disk."""
        self._closed.set()
        self._flusher.join()
        self.settle()
        with self._writing:
            self._connection.close()  # the last connection also checkpoints

    def _write(self, counted: dict[tuple[str, str, str, Served], Counts]) -> bool:
        """Whether it could be."""
        rows = [(*key, *_values(counts)) for key, counts in counted.items()]
        try:
            if len(rows) == 1:  # is a transaction of its own
                self._connection.execute(_ADD, rows[0])
                return True
            self._connection.execute("BEGIN")
            self._connection.executemany(_ADD, rows)
            self._connection.execute("COMMIT")
            return True
        except sqlite3.Error as error:  # a full disk: tenants are served, and the operator is told
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
            pause = max(_FLUSH_S, _REST * (time.monotonic() - begun))  # a long bill takes a while to look through

    def keep(self) -> None:
        """Bring to the disk what is written, unless its file has gone or is damaged: nobody would read that."""
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
                self._connection.close()  # which may mend it: what is newer lies beside it
                with contextlib.suppress(ConfigError):
                    self._connection, self._damaged = _open(self._database), False
        self.settle()
        with self._writing, contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")


def _open(database: Path | None) -> sqlite3.Connection:
    try:
        if database is not None:  # for this user only, and so are the files that SQLite puts beside it
            with contextlib.suppress(FileExistsError):  # to close one that SQLite has open would lose its locks
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
            raise sqlite3.DatabaseError("it is another release's")
        connection.execute(f"PRAGMA user_version = {_VERSION}")  # writes: a full disk is found now
        if _is_damaged(database):  # here already: its descriptor stays for as long as this connection is open
            raise sqlite3.DatabaseError("it is damaged")
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(
            f"[usage] database = {database}: {error}; make room and let it be written, or choose another file"
        ) from error
    return connection


def _is_damaged(database: Path | None) -> bool:
    """Whether somebody else could not read it: a connection that is open has in memory what was there before."""
    try:
        with contextlib.closing(sqlite3.connect(database or ":memory:", timeout=_LOCK_S)) as connection:
            found = (message for (message,) in connection.execute("PRAGMA quick_check"))
            return any(message != "ok" and _ROW_DAMAGE not in message for message in found)
    except sqlite3.Error as error:
        return getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


def _identity(database: Path | None) -> tuple[int, int] | None:
    """Of the file by that name; None if there is none."""
    with contextlib.suppress(OSError):
        if database is not None:
            status = database.stat()
            return status.st_dev, status.st_ino
    return None


def read(
    database: Path, *, since: str = "", damaged: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, str | int]]:
    """The bill, by day, tenant and role, also while a provider is writing it.

    Args:
        database: of a provider.
        since: the first day, like 2026-01-31.
        damaged: is told of every row that holds something else than counts and text; these values are 0 in the bill,
            and characters that are no text are replaced.

    Raises ConfigError if there is no such file, or something else in it.
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
