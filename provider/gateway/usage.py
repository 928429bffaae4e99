"""The bill: what each tenant has used, per day and role, in one SQLite file in WAL mode.

Counts are added in memory. Once a second, and at the stop, one transaction adds what is new since the last commit: no
request waits for it, and nothing is on the bill twice. SIGKILL and a power cut lose the counts of the last second. A
commit that fails (the disk is full, another process holds the file, the file is damaged) is tried again a second later;
`unwritten_s` gives the time since then.
"""

import contextlib
import glob
import operator
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import msgspec

from provider import logs
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.limits import Role
from symbiosis_priv.network.tls import TenantIdentity
from symbiosis_priv.system.pacing import Periodic

log = logs.EventLog(__name__)

_VERSION: Final = 2  # of the file
_COMMIT_S: Final = 1.0
_LOCK_S, _LOCK_AT_START_S = 0.25, 10.0  # longest waits for another process that writes
_LOCKED: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_PROTOCOL)
_CLOSE_S: Final = 60.0
_MOST: Final = (1 << 63) - 1  # the largest sum in SQLite
_MAX_UNWRITTEN_S: Final = 3600.0  # longest time that tenants are served while their usage cannot be written


class UsageCounts(msgspec.Struct, frozen=True):  # ten times faster than a dataclass
    """Counters of a tenant. Bytes are those of payloads."""

    requests: int = 0  # answered products
    rows: int = 0  # multiplied, also for requests that were abandoned, late or failed
    work: int = 0  # multiply-adds for these rows, including the keystream of effects
    bytes_received: int = 0  # of requests, answered or not
    bytes_sent: int = 0  # of products
    failed: int = 0  # requests that failed in the provider
    refused: int = 0  # requests
    abandoned: int = 0  # requests whose tenant left before the answer
    slow: int = 0  # connections that were closed because the tenant sent or read too slowly


BilledRole = Role | Literal["none"]  # the role in which a tenant is served; "none" before its hello

COUNTED: Final = UsageCounts.__struct_fields__
_NOTHING: Final = (0,) * len(COUNTED)
COLUMNS: Final = ("day", "tenant", "authority", "role", *COUNTED)

_CREATE: Final = f"""
CREATE TABLE IF NOT EXISTS usage (
    day TEXT, tenant TEXT, authority TEXT, role TEXT, {", ".join(f"{name} INTEGER" for name in COUNTED)},
    PRIMARY KEY (day, tenant, authority, role)
) WITHOUT ROWID, STRICT
"""
_ADD: Final = f"""
INSERT INTO usage VALUES ({", ".join("?" * len(COLUMNS))})
ON CONFLICT DO UPDATE SET
{", ".join(f"{name} = min({name}, {_MOST} - excluded.{name}) + excluded.{name}" for name in COUNTED)}
"""


class UsageCounters:
    """The counters of one provider. Thread-safe. The file `database` is made if it does not exist; without one, counts
    are in memory only. Several providers may share a file, which then holds their sums. Raises `ConfigError`: the file
    cannot be written, is damaged, or belongs to another release; or a file beside it belongs to another user or to an
    earlier release."""

    def __init__(self, database: Path | None) -> None:
        self._database = database
        self._totals: dict[tuple[TenantIdentity, BilledRole], tuple[int, ...]] = {}  # since the start
        self._written = dict(self._totals)  # what the file has of them
        self._failing_since: float | None = None
        self._lock, self._writing = threading.Lock(), threading.Lock()
        if database is not None:
            _check_beside(database)
            try:
                with contextlib.closing(_connect(database, wait_s=_LOCK_AT_START_S)) as connection:
                    connection.execute(f"PRAGMA user_version = {_VERSION}")  # a write, to notice a full disk now
                    if connection.execute("PRAGMA quick_check(1)").fetchall() != [("ok",)]:
                        raise sqlite3.DatabaseError("the file is damaged")
            except (sqlite3.Error, OSError) as error:
                raise ConfigError(
                    f"[usage] database = {database}: {error}; free disk space and allow writing, restore the file from "
                    f"a copy, or choose another file"
                ) from error
        self._flusher = Periodic(self.settle, every_s=_COMMIT_S, name="usage")
        self._flusher.start()

    def count(self, tenant: TenantIdentity, role: BilledRole, counts: UsageCounts) -> None:
        """Add to a tenant's counters."""
        with self._lock:
            before = self._totals.get((tenant, role), _NOTHING)
            self._totals[tenant, role] = tuple(map(operator.add, before, msgspec.structs.astuple(counts)))

    def settle(self) -> None:
        """Commit all earlier counts to the file, for today. Waits for another process for 0.25 s at most."""
        with self._writing:
            with self._lock:
                totals = dict(self._totals)
            try:
                self._commit(totals)
                self._failing_since = None
            except (sqlite3.Error, OSError) as error:  # for example a full disk: keep serving, and warn the operator
                log.often("usage_not_counted", error=type(error).__name__)
                self._failing_since = self._failing_since or time.monotonic()

    def _commit(self, totals: dict[tuple[TenantIdentity, BilledRole], tuple[int, ...]]) -> None:
        day, rows = f"{datetime.now(UTC):%Y-%m-%d}", []
        for (tenant, role), counts in totals.items():
            if counts != (before := self._written.get((tenant, role), _NOTHING)):
                new = (min(count, _MOST) for count in map(operator.sub, counts, before))
                rows.append((day, tenant.name, tenant.authority, role, *new))
        if rows and self._database is not None:
            with contextlib.closing(_connect(self._database)) as connection, connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(_ADD, rows)
        self._written = totals

    @property
    def unwritten_s(self) -> float:
        """Seconds for which counts could not be written; 0.0 if all counts are written."""
        since = self._failing_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def can_bill(self) -> bool:
        """False if usage could not be written for an hour: requests are then refused, not served unbilled."""
        return self.unwritten_s <= _MAX_UNWRITTEN_S

    def totals(self) -> dict[tuple[TenantIdentity, BilledRole], UsageCounts]:
        """The counts since this process started."""
        with self._lock:
            return {key: UsageCounts(*counts) for key, counts in self._totals.items()}

    def requests(self, tenant: TenantIdentity | None = None) -> int:
        """Number of answered products, of one tenant or of all, since this process started."""
        return sum(counts.requests for (who, _), counts in self.totals().items() if tenant in (None, who))

    def close(self) -> None:
        """Commit all counts, and close the file. Counts that cannot be written are lost."""
        self._flusher.close(_CLOSE_S)
        self.settle()
        if self._failing_since is not None:
            log.warning("usage_lost", unwritten_s=self.unwritten_s)


def read(database: Path) -> Iterator[dict[str, str | int]]:
    """Read the bill by day, tenant and role. Works while a provider writes the file, which commits once a second.
    Raises `ConfigError`: the file does not exist, is damaged or is not a usage database; or a file beside it belongs to
    another user or to an earlier release."""
    _check_beside(database)
    try:
        uri = f"{database.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            rows = connection.execute("SELECT * FROM usage ORDER BY 1, 2, 3, 4").fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"{database} is not a provider's usage database ({error}); check [usage] database") from error
    yield from (dict(zip(COLUMNS, row, strict=True)) for row in rows)


def _connect(database: Path, *, wait_s: float = _LOCK_S) -> sqlite3.Connection:
    """Open the file for one commit, so that a file that was moved, replaced or cut is noticed. Raises `sqlite3.Error`,
    `OSError`."""
    with contextlib.suppress(FileExistsError):  # for this user only; SQLite gives its other files the same mode
        os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(database, isolation_level=None, timeout=wait_s)
    try:
        run = connection.execute
        until = time.monotonic() + wait_s
        while True:  # SQLite does not wait for another process that changes the mode of the same new file
            try:
                run("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _LOCKED or time.monotonic() > until:
                    raise
                time.sleep(0.01)
        run("PRAGMA synchronous = FULL")  # after a power cut the bill has every commit
        run(_CREATE)
        (version,) = run("PRAGMA user_version").fetchone()
        if version > _VERSION or tuple(name for _, name, *_ in run("PRAGMA table_info(usage)")) != COLUMNS:
            raise sqlite3.DatabaseError("the file belongs to another release")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_beside(database: Path) -> None:
    """Raises `ConfigError` if a file beside the database could carry forged counts, or counts of an earlier release."""
    for path in database.parent.glob(f"{glob.escape(database.name)}.*-*"):
        if path.name.startswith((f"{database.name}.log-", f"{database.name}.counts-")):
            raise ConfigError(
                f"[usage] database = {database}: {path} has counts of an earlier release, which was killed. Start that "
                f"release once and stop it with SIGTERM, so that it commits them; or delete the file"
            )
    owners = {0, os.geteuid()}
    with contextlib.suppress(OSError):
        owners.add(database.stat().st_uid)
    for path in (database.with_name(database.name + end) for end in ("-wal", "-shm", "-journal")):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if status.st_uid not in owners or not stat.S_ISREG(status.st_mode):
                raise ConfigError(
                    f"[usage] database = {database}: {path} belongs to another user, or is no regular file; delete it, "
                    f"or choose a file in a folder to which only this user can write"
                )
