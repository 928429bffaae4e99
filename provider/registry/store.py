"""The descriptors of a registry, in SQLite: the newest descriptor of each key.

A descriptor is on disk before the registry replies that it was accepted. A descriptor is kept, even after its expiry,
for as long as an older descriptor of the same key could be valid. So an older descriptor never replaces a newer one.

The number of rows is limited. When the store is full, a new executor replaces an executor of the operator with the most
executors.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from symbiosis_priv.errors import ConfigError, DescriptorError, StorageError
from symbiosis_priv.federation.parties import plain
from symbiosis_priv.registry.descriptor import MEMORY_S, MS, VerifiedDescriptor
from symbiosis_priv.registry.protocol import MAX_LISTED

_VERSION: Final = 2
_WAIT_S: Final = 5.0  # longest wait for another process's lock
_CREATE: Final = """
CREATE TABLE newest (
    key TEXT PRIMARY KEY, operator TEXT NOT NULL, model TEXT NOT NULL,
    issued INTEGER NOT NULL, digest BLOB NOT NULL, expires INTEGER NOT NULL, data BLOB NOT NULL
) STRICT
"""


class Store:
    """The stored descriptors, in a file that is created if it does not exist, or in memory. Thread-safe. Raises
    `ConfigError` if the file is not a registry's; every failure of the disk raises `StorageError`."""

    def __init__(self, database: Path | None, *, limit: int = MAX_LISTED) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        try:
            self._connection = sqlite3.connect(
                database or ":memory:", isolation_level=None, check_same_thread=False, timeout=_WAIT_S
            )
            with contextlib.ExitStack() as failing:
                failing.callback(self._connection.close)
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = FULL")
                with self._transaction():
                    (version,) = self._execute("PRAGMA user_version").fetchone()
                    (tables,) = self._execute("SELECT count(*) FROM sqlite_master").fetchone()
                    if not version and not tables:
                        self._execute(_CREATE)
                        self._execute(f"PRAGMA user_version = {_VERSION}")
                    elif version != _VERSION:
                        raise DescriptorError(f"its version is {version}, not {_VERSION}")
                failing.pop_all()
        except (sqlite3.Error, StorageError, DescriptorError) as error:
            raise ConfigError(
                f"{database} is not the database of a registry ({error}): choose another file with --database"
            ) from error

    def put(self, new: VerifiedDescriptor, *, now: float, admit: Callable[[], None] = lambda: None) -> None:
        """Store a descriptor in place of an older one of the same key. A repeated descriptor changes nothing. `admit`
        is called before a new descriptor is written, and may raise to refuse it. `now` is in seconds since 1970. Raises
        `DescriptorError`: a newer descriptor of the key is stored, or the store is full; `StorageError`: the descriptor
        could not be written."""
        body, operator = new.descriptor, plain(new.operator)
        with self._transaction():
            self._execute("DELETE FROM newest WHERE issued < ?", round(MS * (now - MEMORY_S)))
            if (known := self._known(new)) == new.age:
                return
            admit()
            if known is None:
                counts = dict(
                    self._execute("SELECT operator, count(*) FROM newest GROUP BY operator ORDER BY operator")
                )
                if sum(counts.values()) >= self._limit:
                    busiest = max(counts, key=counts.__getitem__)
                    if counts[busiest] <= counts.get(operator, 0) + 1:
                        raise DescriptorError(f"there are {self._limit} executors already")
                    oldest = "SELECT key FROM newest WHERE operator = ? ORDER BY expires LIMIT 1"
                    self._execute(f"DELETE FROM newest WHERE key = ({oldest})", busiest)
            self._execute(
                "INSERT OR REPLACE INTO newest VALUES (?, ?, ?, ?, ?, ?, ?)",
                *(new.key, operator, body.model_digest, body.issued, new.digest, body.expires, new.data),
            )

    def holds(self, new: VerifiedDescriptor) -> bool:
        """Returns True if the descriptor is stored. Raises `DescriptorError`: a newer one of its key is;
        `StorageError`."""
        with self._transaction("BEGIN"):
            return self._known(new) == new.age

    def _known(self, new: VerifiedDescriptor) -> tuple[int, bytes] | None:
        """The age of the stored descriptor of the same key."""
        known: tuple[int, bytes] | None
        known = self._execute("SELECT issued, digest FROM newest WHERE key = ?", new.key).fetchone()
        if known is not None and known > new.age:
            raise DescriptorError("a newer descriptor of the same key is known")
        return known

    def listed(self, model: str | None, *, now: float) -> list[bytes]:
        """The descriptors that have not expired, of one model or of all models, in order of issue."""
        with self._transaction("BEGIN"):
            rows = self._execute(
                "SELECT data FROM newest WHERE expires > ?1 AND model = ifnull(?2, model) ORDER BY issued, digest",
                round(MS * now),
                model,
            )
            return [data for (data,) in rows]

    def drop_unless(self, good: Callable[[bytes, float], bool]) -> int:
        """Remove the descriptors for which `good(data, time of issue in seconds since 1970)` is False. Returns their
        number."""
        with self._transaction():
            rows = self._execute("SELECT key, data, issued FROM newest").fetchall()
            bad = [key for key, data, issued in rows if not good(data, issued / MS)]
            for key in bad:
                self._execute("DELETE FROM newest WHERE key = ?", key)
        return len(bad)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    @contextlib.contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
        """All statements or none. Raises `StorageError`."""
        with self._lock:
            try:
                with self._connection:
                    self._execute(begin)
                    yield
            except sqlite3.Error as error:
                raise StorageError(f"the registry's database fails ({error}): check the disk, or make room") from error
