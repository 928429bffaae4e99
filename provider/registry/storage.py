"""A registry's log in SQLite: append only, hash-chained (`symbiosis_priv.registry.history`), and bounded.

Every descriptor is one row, written and synchronised before its executor hears that it was accepted. What has expired
long ago is forgotten from the beginning on: the log then starts later, with the hash that leads there, so whoever kept
the entries before can still join them to it. One process writes; others may read at the same time.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from symbiosis_priv.errors import ConfigError, DescriptorError, StorageError
from symbiosis_priv.registry.descriptor import Announced
from symbiosis_priv.registry.history import Span, beginning, link
from symbiosis_priv.registry.protocol import MAX_LISTED, PAGE
from symbiosis_priv.registry.statements import MS

MAX_LOG_BYTES: Final = 8 << 30
"""Twice what a thousand executors announce in eight days, each every five minutes."""

_VERSION: Final = 1
_WAIT_S: Final = 5.0  # for another process's lock

_CREATE = f"""
CREATE TABLE log (
    number INTEGER PRIMARY KEY, data BLOB NOT NULL, hash BLOB NOT NULL,
    key TEXT NOT NULL, model TEXT NOT NULL, issued INTEGER NOT NULL, digest BLOB NOT NULL, expires INTEGER NOT NULL
) STRICT;
CREATE TABLE newest (key TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID, STRICT;
CREATE TABLE state (
    only INTEGER PRIMARY KEY CHECK (only = 0),
    name TEXT NOT NULL, after INTEGER NOT NULL, before BLOB NOT NULL, head BLOB NOT NULL
) STRICT;
CREATE TRIGGER log_is_append_only BEFORE UPDATE ON log BEGIN SELECT RAISE(ABORT, 'the log is append only'); END;
PRAGMA user_version = {_VERSION};
"""


class Log:
    """The log of one registry. Thread-safe. Whatever cannot be read or written is a `StorageError`.

    Args:
        database: a file, made if there is none; None keeps it in memory.
        name: of the registry whose log this is.
        max_bytes: that the entries may take. What has been forgotten makes room.

    Raises ConfigError if it is another registry's, or no log, or damaged.
    """

    def __init__(self, database: Path | None, *, name: str, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.name = name
        self._lock = threading.Lock()
        try:
            self._connection = sqlite3.connect(
                database or ":memory:", isolation_level=None, check_same_thread=False, timeout=_WAIT_S
            )
            with contextlib.ExitStack() as failing:
                failing.callback(self._connection.close)
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = FULL")
                (page,) = self._connection.execute("PRAGMA page_size").fetchone()
                self._connection.execute(f"PRAGMA max_page_count = {max(1, max_bytes // page)}")
                self._create(name)
                self._check(name)
                failing.pop_all()
        except (sqlite3.Error, DescriptorError) as error:
            raise ConfigError(
                f"{database} is not the log of registry {name!r} ({error}): choose another file with --database; "
                f"a registry that has lost its log begins a new one under a new name"
            ) from error

    def append(self, announced: Announced, *, admit: Callable[[], None] = lambda: None) -> int:
        """Take a descriptor in; its number. One that is in already keeps its number.

        Args:
            admit: called if it is new, before it is written; what it raises is raised here.

        Raises:
            DescriptorError: a newer one of the key is in the log, or there are too many keys.
            StorageError: it could not be written.
        """
        with self._transaction():
            last = self._newest(announced.key)
            if last is not None and last[1:] == announced.age:
                return last[0]
            if last is None and self._one("SELECT count(*) FROM newest")[0] >= MAX_LISTED:
                raise DescriptorError(f"there are {MAX_LISTED} executors already")
            self._require_newer(announced, last)
            admit()
            return self._add(announced)

    def extend(self, announced: Sequence[Announced], *, head: bytes) -> None:
        """As a replica: the next entries of the log that is followed, and a signed head of it. Errors of `append`."""
        with self._transaction():
            for one in announced:
                self._require_newer(one, self._newest(one.key))
                self._add(one)
            self._connection.execute("UPDATE state SET head = ?", (head,))

    def begin_at(self, after: int, before: bytes) -> None:
        """As a replica that knows nothing yet, or has been away for too long: begin after this entry."""
        with self._transaction():
            self._connection.execute("DELETE FROM log")
            self._connection.execute("DELETE FROM newest")
            self._connection.execute("UPDATE state SET after = ?, before = ?", (after, before))

    @property
    def position(self) -> tuple[int, bytes]:
        """Number and hash of the last entry."""
        with self._reading():
            return self._position()

    @property
    def expires(self) -> float:
        """When the last of its entries does, in seconds since 1970; 0 if it is empty."""
        with self._reading():
            return float(self._one("SELECT coalesce(max(expires), 0) FROM log")[0] / MS)

    @property
    def head(self) -> bytes:
        """The newest signed head that a replica has been given; empty if there is none."""
        with self._reading():
            data: bytes = self._one("SELECT head FROM state")[0]
            return data

    def listed(self, model: str, *, now: float, vouched: Callable[[bytes], bool] = lambda data: True) -> list[bytes]:
        """The newest descriptor of every key, if it is of this model, has not expired, and somebody vouches for it."""
        with self._reading():
            rows = self._connection.execute(
                "SELECT data FROM newest JOIN log USING (number) WHERE model = ? AND expires > ? "
                "ORDER BY number DESC LIMIT ?",
                (model, round(MS * now), MAX_LISTED),
            )
            found = [data for (data,) in rows]
        return [data for data in reversed(found) if vouched(data)]

    def span(self, after: int) -> Span:
        """Up to a page of entries after a number, or from the first one that is known."""
        with self._reading():
            start, before = self._one("SELECT after, before FROM state")
            after = max(start, after)
            if after > start:
                row = self._connection.execute("SELECT hash FROM log WHERE number = ?", (after,)).fetchone()
                if row is None:  # beyond the end
                    after, before = self._position()
                else:
                    (before,) = row
            rows = self._connection.execute(
                "SELECT data FROM log WHERE number > ? ORDER BY number LIMIT ?", (after, PAGE)
            )
            return Span(after, before, [data for (data,) in rows])

    def forget(self, *, expired_before: float) -> int:
        """Drop entries from the beginning as long as they have expired before this; how many."""
        moment = round(MS * expired_before)
        with self._transaction():
            (first_kept,) = self._one("SELECT min(number) FROM log WHERE expires >= ?", (moment,))
            last, last_hash = self._position()
            dropped = last if first_kept is None else first_kept - 1
            (start,) = self._one("SELECT after FROM state")
            if dropped <= start:
                return 0
            if dropped < last:
                (last_hash,) = self._one("SELECT hash FROM log WHERE number = ?", (dropped,))
            self._connection.execute("UPDATE state SET after = ?, before = ?", (dropped, last_hash))
            self._connection.execute("DELETE FROM log WHERE number <= ?", (dropped,))
            self._connection.execute("DELETE FROM newest WHERE number <= ?", (dropped,))
            return int(dropped - start)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    # Inside the lock

    def _add(self, announced: Announced) -> int:
        number, before = self._position()
        said = announced.said
        self._connection.execute(
            "INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                number + 1,
                announced.data,
                link(before, announced.data),
                announced.key,
                said.model_digest,
                said.issued,
                announced.digest,
                said.expires,
            ),
        )
        self._connection.execute("INSERT OR REPLACE INTO newest VALUES (?, ?)", (announced.key, number + 1))
        return number + 1

    def _require_newer(self, announced: Announced, last: tuple[int, int, bytes] | None) -> None:
        if last is not None and announced.age <= last[1:]:
            raise DescriptorError("one of the same key that is as new is in the log already")

    def _position(self) -> tuple[int, bytes]:
        row = self._connection.execute("SELECT number, hash FROM log ORDER BY number DESC LIMIT 1").fetchone()
        number, found = row or self._one("SELECT after, before FROM state")
        return number, found

    def _newest(self, key: str) -> tuple[int, int, bytes] | None:
        query = "SELECT number, issued, digest FROM newest JOIN log USING (number) WHERE newest.key = ?"
        row: tuple[int, int, bytes] | None = self._connection.execute(query, (key,)).fetchone()
        return row

    def _one(self, query: str, values: tuple[object, ...] = ()) -> tuple[Any, ...]:
        row: tuple[Any, ...] = self._connection.execute(query, values).fetchone()
        return row

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise StorageError(f"cannot read the registry's log ({error}): look at the disk where it is") from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:  # some errors have rolled it back
                        self._connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise StorageError(
                    f"cannot write the registry's log ({error}): make room where it is, or raise --max-log-mib"
                ) from error

    # At the start

    def _create(self, name: str) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not version and not tables:
            for statement in _statements(_CREATE):
                self._connection.execute(statement)
            self._connection.execute("INSERT INTO state VALUES (0, ?, 0, ?, x'')", (name, beginning(name)))
        self._connection.execute("COMMIT")

    def _check(self, name: str) -> None:
        """Refuse another registry's log, and one that has been altered."""
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version != _VERSION:
            raise DescriptorError(f"its version is {version}")
        (found,) = self._connection.execute("SELECT name FROM state").fetchone()
        if found != name:
            raise DescriptorError(f"it is that of {found!r}")
        number, before = self._connection.execute("SELECT after, before FROM state").fetchone()
        for row, data, own in self._connection.execute("SELECT number, data, hash FROM log ORDER BY number"):
            number, before = number + 1, link(before, data)
            if row != number or own != before:
                raise DescriptorError(f"entry {number} is not the one that was written")


def _statements(script: str) -> Iterator[str]:
    """One after the other: `executescript` would end the transaction that they are to be part of."""
    text = ""
    for line in script.splitlines():
        text += line + "\n"
        if sqlite3.complete_statement(text):
            yield text
            text = ""
