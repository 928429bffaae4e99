"""The bill: what each tenant has used, per day and role. The bill survives any end of this process.

The counts are in one SQLite file in WAL mode. A commit takes eight system calls, so no request waits for one. A request
is counted in a journal in mapped memory (`usage_journal`) before it is answered. Once a second, a thread commits the
counts that the file does not have yet. The same commit records the committed totals of each journal, so every count is
in the bill once, whenever the process is killed. After a SIGKILL, the bill and the tenants' own counts differ by the
requests in flight at most. `read` adds the counts that are in journals only, and the next provider that opens the file
commits them. Every few seconds the file is flushed to the disk; a power cut loses at most the counts since the last
flush.

Counts that cannot be written (the disk is full or slow, or another process writes) stay in the journal and are tried
again; `unwritten_s` gives the time since then. If the file is deleted, a new one is made within seconds. Nothing is
written to a file that has replaced the first one, or to a damaged file before it is repaired. A file lists each of its
journals from the start of the journal; journals that it does not list are not added to it.
"""

import contextlib
import itertools
import operator
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeGuard, cast

import msgspec

from provider import logs
from provider.gateway.usage_journal import MOST, Journal, JournalReader, Key, Totals, journals, owners_of, pack, unpack
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.limits import Role
from symbiosis_priv.network.tls import TenantIdentity
from symbiosis_priv.system.files import UNDECODABLE

log = logs.EventLog(__name__)

_VERSION = 1  # of the file
_COMMIT_S = 1.0
_FLUSH_S = 5.0
_REST = 20  # the pause between two flushes is at least this many times the duration of a flush
_LOCK_S = 0.25  # longest wait for another process that writes
_DAY_S = 86_400


class UsageCounts(msgspec.Struct, frozen=True):  # ten times faster than a dataclass
    """Counters of a tenant.

    Args:
        requests: answered products.
        rows: rows that were multiplied, also for requests that were abandoned, late or failed.
        work: multiply-adds for these rows, including the keystream of effects.
        bytes_received: payload bytes of requests, whether they were answered or not, and of blocks that helpers sent
            for the tenant.
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


_ROW_DAMAGE = "value in usage."  # part of SQLite's message for a value of the wrong type; other rows are intact
COUNTED = UsageCounts.__struct_fields__
_values = msgspec.structs.astuple
_ZEROS = (0,) * len(COUNTED)


class _DamagedRecordError(sqlite3.DatabaseError):
    """The file's record of a journal cannot be read."""


JournalTotals = list[tuple[Key, Totals]]

BilledRole = Role | Literal["none"]
"""The role in which a tenant is served; "none" before its hello."""

_KEY = ("day", "tenant", "authority", "role")
COLUMNS = (*_KEY, *COUNTED)

_CREATE = f"""
CREATE TABLE IF NOT EXISTS usage (
    day TEXT, tenant TEXT, authority TEXT, role TEXT, {", ".join(f"{name} INTEGER" for name in COUNTED)},
    PRIMARY KEY (day, tenant, authority, role)
) WITHOUT ROWID, STRICT
"""
_CREATE_JOURNALS = "CREATE TABLE IF NOT EXISTS journals (name TEXT PRIMARY KEY, settled BLOB) WITHOUT ROWID, STRICT"
_RECORD = "INSERT OR REPLACE INTO journals VALUES (?, ?)"
_FORGET = "DELETE FROM journals WHERE name = ?"


def _sum(name: str) -> str:
    """SQL for a sum that cannot fail: a stored value that is not a count is 0, and the sum is limited to `MOST`."""
    return f"min(max(coalesce(CAST({name} AS INTEGER), 0), 0), {MOST} - excluded.{name}) + excluded.{name}"


_ADD = f"""
INSERT INTO usage VALUES ({", ".join("?" * len(COLUMNS))})
ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {_sum(name)}" for name in COUNTED)}
"""


class UsageCounters:
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
        self._journals: list[Journal] = []  # counts go to the last one
        self._ended: dict[Key, Totals] = {}  # sums of replaced journals, without the day
        self._day = (0, "")
        try:
            self._take_over()
            self._begin_journal()
        except (sqlite3.Error, OSError) as error:
            self._connection.close()
            raise _unusable(database, error) from error
        self._closed = threading.Event()
        self._flusher = threading.Thread(target=self._run, name="usage", daemon=True)
        self._flusher.start()

    def count(self, tenant: TenantIdentity, role: BilledRole, counts: UsageCounts) -> None:
        """Add to a tenant's counters. The counts survive the end of this process."""
        values = _values(counts)
        with self._lock:
            key = (self._today(), tenant.name, tenant.authority, role)
            if not self._journals[-1].add(key, values):  # the journal is full: hundreds of new tenants within a second
                self._journals.append(Journal(None, fields=len(COUNTED)))
                self._journals[-1].add(key, values)

    def settle(self) -> None:
        """Commit all earlier counts to the file. Waits for another commit or another process for 0.25 s at most."""
        if not self._writing.acquire(timeout=_LOCK_S):
            self._failing_since = self._failing_since or time.monotonic()
            return
        try:
            with self._lock:
                found = [(journal, journal.totals()) for journal in self._journals]
            changed = [(journal, slots) for journal, slots in found if [t for _, t in slots] != journal.settled]
            if changed and not self._write(changed):
                self._failing_since = self._failing_since or time.monotonic()
                return
            self._failing_since = None
            last = found[-1][0]
            if last.outdated or (self._database is not None and not last.name):  # counts in memory end with the process
                self._renew_journals(found)
        finally:
            self._writing.release()

    @property
    def unwritten_s(self) -> float:
        """Seconds for which counts could not be written; 0.0 if all counts are written."""
        since = self._failing_since
        return 0.0 if since is None else time.monotonic() - since

    def totals(self) -> dict[tuple[TenantIdentity, BilledRole], UsageCounts]:
        """The counts since this process started."""
        with self._lock:
            sums = dict(self._ended)
            found = [journal.totals() for journal in self._journals]
        for slots in found:
            _add_to(sums, slots)
        return {
            (TenantIdentity(name, authority=authority), cast("BilledRole", role)): UsageCounts(*totals)
            for (name, authority, role), totals in sums.items()
        }

    def close(self) -> None:
        """Write all counts to the disk, and close the file. If that fails, the journals stay for the next provider."""
        self._closed.set()
        self._flusher.join()
        self.settle()
        with self._writing, self._lock:
            for journal in self._journals:
                if self._failing_since is None:
                    self._end(journal)
                else:
                    journal.close(remove=False)
            self._connection.close()  # the last connection also checkpoints

    def _take_over(self) -> None:
        """Commit the counts in journals of providers that were killed."""
        if self._database is None:
            return
        run = self._connection.execute
        with journals(self._database, fields=len(COUNTED)) as found:
            for journal in filter(JournalReader.lock, found):
                name = journal.path.name
                run("BEGIN IMMEDIATE")
                self._connection.executemany(_ADD, _missing_rows(self._connection, name, journal.totals()))
                run(_FORGET, (name,))
                run("COMMIT")
                journal.path.unlink()
        for (name,) in run("SELECT name FROM journals").fetchall():
            if not self._database.with_name(name).exists():
                run(_FORGET, (name,))

    def _begin_journal(self) -> None:
        """Count in a new journal from now on. Raises OSError or sqlite3.Error."""
        journal = Journal(self._database, fields=len(COUNTED))
        if journal.name:
            self._connection.execute(_RECORD, (journal.name, pack(())))
        with self._lock:
            self._journals.append(journal)

    def _renew_journals(self, settled: Sequence[tuple[Journal, JournalTotals]]) -> None:
        """Replace journals that were just settled. A journal with newer counts is replaced next time."""
        try:
            self._begin_journal()
        except (sqlite3.Error, OSError) as error:
            log.often("usage_not_counted", error=type(error).__name__)
            return
        with self._lock:
            for journal, slots in settled:
                if journal.totals() == slots:
                    self._journals.remove(journal)
                    _add_to(self._ended, slots)
                    self._end(journal)

    def _end(self, journal: Journal) -> None:
        """Remove a settled journal, and its record in the database."""
        journal.close(remove=True)
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute(_FORGET, (journal.name,))

    def _write(self, changed: Sequence[tuple[Journal, JournalTotals]]) -> bool:
        """Commit the counts of journals that the file does not have. Returns False if that fails."""
        rows = [row for journal, slots in changed for row in _rows(slots, journal.settled)]
        settled = [(journal, [totals for _, totals in slots]) for journal, slots in changed]
        try:
            self._connection.execute("BEGIN")
            self._connection.executemany(_ADD, rows)
            self._connection.executemany(_RECORD, [(journal.name, pack(totals)) for journal, totals in settled])
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:  # for example a full disk: keep serving, and warn the operator
            log.often("usage_not_counted", error=type(error).__name__)
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            return False
        for journal, totals in settled:
            journal.settled = totals
        return True

    def _today(self) -> str:
        number = int(time.time() // _DAY_S)
        if number != self._day[0]:
            self._day = (number, datetime.fromtimestamp(number * _DAY_S, UTC).strftime("%Y-%m-%d"))
        return self._day[1]

    def _run(self) -> None:
        next_flush = time.monotonic() + _FLUSH_S
        while not self._closed.wait(_COMMIT_S):
            if (begun := time.monotonic()) < next_flush:
                self.settle()
                continue
            self.flush()
            ended = time.monotonic()  # checking a long bill takes a while
            next_flush = ended + max(_FLUSH_S, _REST * (ended - begun))

    def flush(self) -> None:
        """Commit all counts, and flush the file to the disk. Opens the file again if it was deleted or is damaged."""
        found = _identity(self._database)
        if found != self._file:
            log.often("usage_database_gone", path=str(self._database), replaced=found is not None)
            with self._writing:
                self._connection.close()
                if found is None:
                    self._open_again()
        elif self._damaged or _is_damaged(self._database):
            log.often("usage_database_damaged", path=str(self._database))
            with self._writing:
                self._damaged = True
                self._connection.close()  # closing may repair the file: the newer pages are in the WAL file
                self._open_again()
        self.settle()
        with self._writing, contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _open_again(self) -> None:
        """Open a new or repaired file. A restored older copy gets the later counts again."""
        with contextlib.suppress(ConfigError):
            connection = _open(self._database)
            try:
                for journal in filter(lambda journal: journal.name, self._journals):
                    if (settled := _settled(connection, journal.name)) is None:
                        connection.execute(_RECORD, (journal.name, pack(journal.settled)))
                    else:
                        journal.settled = settled
            except sqlite3.Error:
                connection.close()
                return
            self._connection, self._file, self._damaged = connection, _identity(self._database), False


def _add_to(sums: dict[Key, Totals], slots: JournalTotals) -> None:
    """Add the totals of a journal to sums over all days."""
    for (_, *key), totals in slots:
        sums[tuple(key)] = tuple(map(operator.add, sums.get(tuple(key), _ZEROS), totals))


def _rows(slots: Iterable[tuple[Key | None, Totals]], settled: Sequence[Totals]) -> list[tuple[str | int, ...]]:
    """The rows to add to a file that has the settled totals. (After a power cut, the settled totals may be larger.)"""
    rows: list[tuple[str | int, ...]] = []
    for (key, totals), old in zip(slots, itertools.chain(settled, itertools.repeat(_ZEROS)), strict=False):
        counts = [max(0, now - before) for now, before in zip(totals, old, strict=True)]
        if _is_intact(key) and any(counts):
            rows.append((*key, *counts))
    return rows


def _is_intact(key: Key | None) -> TypeGuard[Key]:
    """False for the key of a damaged slot."""
    return key is not None and len(key) == len(_KEY)


def _settled(connection: sqlite3.Connection, journal: str) -> list[Totals] | None:
    """The totals of a journal that the file has; None if the file does not list the journal."""
    found = connection.execute("SELECT settled FROM journals WHERE name = ?", (journal,)).fetchone()
    try:
        totals = None if found is None else unpack(found[0])
    except UNDECODABLE as error:
        raise _DamagedRecordError(f"the record of {journal} is damaged") from error
    if any(len(counts) != len(COUNTED) for counts in totals or ()):
        raise _DamagedRecordError(f"the record of {journal} is damaged")
    return totals


def _open(database: Path | None) -> sqlite3.Connection:
    try:
        if database is not None:  # for this user only; SQLite gives its other files the same mode
            with contextlib.suppress(FileExistsError):  # closing a file that SQLite has open would drop SQLite's locks
                os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            _check_owners(database)
        connection = sqlite3.connect(
            database or ":memory:", isolation_level=None, check_same_thread=False, timeout=_LOCK_S
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # not while a tenant waits
        connection.execute(_CREATE)
        connection.execute(_CREATE_JOURNALS)
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        columns = tuple(name for _, name, *_ in connection.execute("PRAGMA table_info(usage)"))
        if version > _VERSION or columns != COLUMNS:
            raise sqlite3.DatabaseError("the file belongs to another release")
        connection.execute(f"PRAGMA user_version = {_VERSION}")  # a write, to notice a full disk now
        if _is_damaged(database):  # now, because the descriptor of this check stays open as long as `connection`
            raise sqlite3.DatabaseError("the file is damaged")
    except (sqlite3.Error, OSError) as error:
        raise _unusable(database, error) from error
    return connection


def _check_owners(database: Path) -> None:
    """Refuse SQLite's other files if another user has made them, because SQLite's own error names the database only."""
    owners = owners_of(database)
    for path in (database.with_name(database.name + end) for end in ("-wal", "-shm", "-journal")):
        if path.exists() and path.stat().st_uid not in owners:
            raise ConfigError(
                f"[usage] database = {database}: {path} belongs to another user; delete it, or choose a file in a "
                f"folder to which only this user can write"
            )


def _unusable(database: Path | None, error: Exception) -> ConfigError:
    return ConfigError(
        f"[usage] database = {database}: {error}; free disk space and allow writing, or choose another file"
    )


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
        damaged: called with a message for every row with a value that is not a count or not text, and for damaged
            parts of journals. A damaged count is 0 in the bill; invalid characters are replaced.

    Raises:
        ConfigError: the file does not exist or is not a usage database.
    """
    try:
        with (
            journals(database, fields=len(COUNTED)) as found,  # first: files that are removed meanwhile stay readable
            contextlib.closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection,
        ):
            connection.text_factory = lambda text: text.decode(errors="replace")
            connection.execute("BEGIN")
            query = f"SELECT {', '.join(COLUMNS)} FROM usage WHERE day >= ? ORDER BY day, tenant, authority, role"
            rows = [_read_row(values, damaged) for values in connection.execute(query, (since,))]
            missing = [
                row for journal in found for row in _intact_rows(connection, journal, damaged) if str(row[0]) >= since
            ]
    except sqlite3.Error as error:
        raise ConfigError(f"{database} is not a provider's usage database ({error}); check [usage] database") from error
    by_key = {tuple([row[name] for name in _KEY]): row for row in rows}
    for added in missing:
        row = dict(zip(COLUMNS, added, strict=True))
        known = by_key.setdefault(added[: len(_KEY)], row)
        if known is row:
            rows.append(row)
        else:
            known.update({name: int(known[name]) + int(row[name]) for name in COUNTED})
    yield from sorted(rows, key=lambda row: [str(row[name]) for name in _KEY])


def _read_row(values: Sequence[Any], damaged: Callable[[str], None]) -> dict[str, str | int]:
    row = dict(zip(COLUMNS, values, strict=True))
    wrong = [name for name in COUNTED if not isinstance(row[name], int) or row[name] < 0]
    wrong += [name for name in _KEY if "\ufffd" in row[name]]
    if wrong:
        damaged(f"{row['day']}, {row['tenant']}, {row['role']}: damaged values of {', '.join(wrong)}")
    return row | {name: 0 for name in wrong if name in COUNTED}


def _missing_rows(
    connection: sqlite3.Connection, journal: str, slots: Iterable[tuple[Key | None, Totals]]
) -> list[tuple[str | int, ...]]:
    """The rows of a journal that the file does not have yet; no rows if the file does not list the journal."""
    settled = _settled(connection, journal)
    return [] if settled is None else _rows(slots, settled)


def _intact_rows(
    connection: sqlite3.Connection, journal: JournalReader, damaged: Callable[[str], None]
) -> list[tuple[str | int, ...]]:
    """The rows of `_missing_rows`. Damaged parts of the journal are left out and passed to `damaged`."""
    slots = list(journal.totals())
    if not all(_is_intact(key) for key, _ in slots):
        damaged(f"{journal.path}: damaged slots, whose counts are not in the bill")
    try:
        return _missing_rows(connection, journal.path.name, slots)
    except _DamagedRecordError as error:
        damaged(f"{journal.path}: {error}, so its counts are not in the bill")
        return []
