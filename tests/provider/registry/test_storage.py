"""The log: append only, chained, durable, bounded, and never another registry's."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provider.registry.storage import Log
from symbiosis_priv.errors import ConfigError, DescriptorError, StorageError
from symbiosis_priv.registry.descriptor import Announced, newest
from symbiosis_priv.registry.history import beginning, link
from symbiosis_priv.registry.protocol import PAGE
from symbiosis_priv.registry.statements import MS
from tests.vouching import DIGEST, Vouching

NAMES = ("gamma", "delta", "epsilon")


@given(announcements=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 5)), max_size=12))
def test_the_newest_of_every_key_is_listed_and_all_are_chained(
    vouching: Vouching, announcements: list[tuple[str, int]]
) -> None:
    """In whatever order they come: stale ones are refused, the same one again changes nothing."""
    log = Log(None, name="registry")
    taken: list[Announced] = []
    for name, step in announcements:
        said = vouching.said(name, issued=vouching.began + step)
        known = [one for one in taken if one.key == said.key]
        if any(one.age > said.age for one in known):
            with pytest.raises(DescriptorError):
                log.append(said)
        elif known and said.said.issued == known[-1].said.issued:
            with contextlib.suppress(DescriptorError):  # signed twice: the later signature is no newer statement
                assert log.append(said) == taken.index(known[-1]) + 1
        else:
            taken.append(said)
            assert log.append(said) == len(taken)
    assert set(log.listed(DIGEST, now=vouching.began / MS)) == {one.data for one in newest(taken).values()}
    span = log.span(0)
    assert list(span.entries) == [one.data for one in taken]
    expected = beginning("registry")
    for one in taken:
        expected = link(expected, one.data)
    assert log.position == (len(taken), expected)
    assert span.hashes()[len(taken)] == expected
    log.close()


def test_only_live_executors_of_the_model_are_listed(vouching: Vouching) -> None:
    log = Log(None, name="registry")
    gamma, epsilon = vouching.said("gamma"), vouching.said("epsilon", lifetime_s=5.0)
    for said in (gamma, vouching.said("delta", model_digest="sha256:" + "8" * 64), epsilon):
        log.append(said)
    now = vouching.began / MS
    assert log.listed(DIGEST, now=now) == [gamma.data, epsilon.data]
    assert log.listed(DIGEST, now=now + 10) == [gamma.data]
    log.close()


def test_it_is_durable_and_belongs_to_one_registry(vouching: Vouching, tmp_path: Path) -> None:
    database = tmp_path / "log.sqlite"
    log = Log(database, name="registry")
    log.append(vouching.said("gamma"))
    position = log.position
    log.close()
    again = Log(database, name="registry")
    assert again.position == position
    assert again.append(vouching.said("delta")) == 2
    again.close()
    with pytest.raises(ConfigError, match="that of 'registry'"):
        Log(database, name="other")
    other = tmp_path / "other.sqlite"
    other.write_bytes(b"not a database, and longer than its header would be" * 9)
    with pytest.raises(ConfigError, match="not the log of registry"):
        Log(other, name="registry")


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM log WHERE number = 2",
        "DROP TRIGGER log_is_append_only; UPDATE log SET data = x'00' WHERE number = 2",
        "DROP TRIGGER log_is_append_only; UPDATE log SET number = 9 WHERE number = 3",
        "UPDATE state SET before = zeroblob(32)",
    ],
)
def test_a_log_that_was_altered_is_not_served(vouching: Vouching, tmp_path: Path, damage: str) -> None:
    database = tmp_path / "log.sqlite"
    log = Log(database, name="registry")
    for name in NAMES:
        log.append(vouching.said(name))
    log.close()
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.executescript(damage)
        connection.commit()
    with pytest.raises(ConfigError, match="is not the one that was written"):
        Log(database, name="registry")


def test_nobody_updates_an_entry(vouching: Vouching, tmp_path: Path) -> None:
    database = tmp_path / "log.sqlite"
    log = Log(database, name="registry")
    log.append(vouching.said("gamma"))
    log.close()
    with contextlib.closing(sqlite3.connect(database)) as connection, pytest.raises(sqlite3.Error, match="append only"):
        connection.execute("UPDATE log SET data = x''")


def test_what_has_expired_is_forgotten_and_the_rest_still_joins_up(vouching: Vouching) -> None:
    log = Log(None, name="registry")
    for step, life in enumerate((10.0, 20.0, 600.0, 10.0)):
        log.append(vouching.said("gamma", issued=vouching.began + step, lifetime_s=life))
    before = log.span(0)
    now = vouching.began / MS
    assert log.forget(expired_before=now) == 0
    assert log.forget(expired_before=now + 100) == 2  # the last one has expired too, behind one that has not
    after = log.span(0)
    assert (after.after, after.before) == (2, before.hashes()[2])
    assert after.hashes()[4] == before.hashes()[4]
    assert log.append(vouching.said("delta")) == 5
    assert log.forget(expired_before=now + 10_000) == 3
    assert log.span(0).after == 5
    assert log.listed(DIGEST, now=now) == []
    assert log.append(vouching.said("gamma")) == 6
    log.close()


def test_a_page_is_bounded_and_pages_join_up(vouching: Vouching) -> None:
    log = Log(None, name="registry")
    announced = [vouching.said("gamma", issued=vouching.began + step) for step in range(PAGE + 3)]
    log.extend(announced, head=b"")
    first = log.span(0)
    assert len(first.entries) == PAGE
    second = log.span(first.last)
    assert second.before == first.hashes()[first.last]
    assert len(second.entries) == 3
    assert log.span(10**9).entries == []
    log.close()


def test_a_replica_takes_no_log_that_goes_back_in_time(vouching: Vouching) -> None:
    log = Log(None, name="registry")
    with pytest.raises(DescriptorError, match="as new"):
        log.extend([vouching.said("gamma", after_ms=5), vouching.said("delta"), vouching.said("gamma")], head=b"")
    assert log.position == (0, beginning("registry"))  # all of it or nothing
    log.close()


def test_what_cannot_be_read_is_an_error_of_this_project() -> None:
    log = Log(None, name="registry")
    log.close()  # as a disk that is gone
    reads = (lambda: log.position, lambda: log.expires, lambda: log.head, lambda: log.span(0))
    for read in (*reads, lambda: log.listed(DIGEST, now=0.0)):
        with pytest.raises(StorageError, match="cannot read"):
            read()


def test_a_full_log_says_so_and_goes_on_when_there_is_room(vouching: Vouching, tmp_path: Path) -> None:
    log = Log(tmp_path / "log.sqlite", name="registry", max_bytes=16 * 4096)

    def fill() -> None:
        for step in range(1000):
            log.append(vouching.said("gamma", issued=vouching.began + step))

    with pytest.raises(StorageError, match="full"):
        fill()
    entries, _ = log.position
    assert log.forget(expired_before=2 * vouching.began / MS) == entries
    assert log.append(vouching.said("delta")) == entries + 1
    log.close()
