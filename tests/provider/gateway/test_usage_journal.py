"""Every count is on the bill once, whenever a provider is killed."""

import contextlib
import os
import sqlite3
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provider.gateway import usage, usage_journal
from provider.gateway.usage import COUNTED, UsageCounters, UsageCounts, read
from provider.gateway.usage_journal import Journal, journals
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.network.tls import TenantIdentity

KEY = ("2026-01-31", "alice", "sha256:a", "executor")
STRANGER = 12_345  # a user id
TENANTS = [TenantIdentity(name, authority="sha256:a") for name in ("alice", "bob", "carol", "dave", "erin")]


def kill(usage: UsageCounters) -> None:
    """Leave the files as SIGKILL leaves them: descriptors and locks are gone, nothing else is written."""
    usage._closed.set()
    usage._flusher.join()
    for journal in usage._journals:
        journal.close(remove=False)
    usage._connection.close()


def count(usage: UsageCounters, tenant: TenantIdentity) -> None:
    usage.count(tenant, "executor", UsageCounts(requests=1, rows=7))


def billed(database: Path) -> Counter[str]:
    bill = list(read(database))
    assert all(row["rows"] == 7 * int(row["requests"]) for row in bill)
    return Counter({str(row["tenant"]): int(row["requests"]) for row in bill})


def files(database: Path) -> int:
    """Number of journals."""
    with journals(database, fields=1) as found:
        return len(found)


def plant(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file belong to another user, or make this process take all files for those of another user."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
    else:
        for module in (usage_journal, usage):
            monkeypatch.setattr(module, "owners_of", lambda database: {STRANGER})


def test_a_journal_that_another_user_plants_is_not_billed_and_does_not_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sticky folder such as /tmp, any user can add a file, and the provider cannot delete it."""
    database = tmp_path / "usage.sqlite"
    UsageCounters(database).close()
    forged = Journal(database, fields=len(COUNTED))
    forged.add(KEY, (1,) * len(COUNTED))
    forged.close(remove=False)
    plant(tmp_path / forged.name, monkeypatch)
    UsageCounters(database).close()
    assert not list(read(database))
    assert (tmp_path / forged.name).exists()


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
def test_a_file_of_sqlite_that_another_user_plants_is_named(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / f"usage.sqlite{end}"
    planted.touch()
    plant(planted, monkeypatch)
    with pytest.raises(ConfigError, match=f"{end} belongs to another user"):
        UsageCounters(tmp_path / "usage.sqlite")


@settings(max_examples=12)
@given(
    steps=st.lists(
        st.integers(0, 2) | st.sampled_from(["settle", "busy", "flush", "kill", "stop", "start another"]), max_size=20
    )
)
def test_every_count_is_on_the_bill_once(steps: list[int | str]) -> None:
    """At any time, for any ends, with commits that fail, and with several providers at one file."""
    with TemporaryDirectory() as folder:
        database = Path(folder) / "usage.sqlite"
        running, true = [UsageCounters(database)], Counter[str]()
        for step in steps:
            usage = running[-1]
            if isinstance(step, int):
                count(usage, TENANTS[step])
                true[TENANTS[step].name] += 1
            elif step == "settle":
                usage.settle()
            elif step == "busy":
                usage._connection.execute("PRAGMA query_only = ON")
                usage.settle()
                usage._connection.execute("PRAGMA query_only = OFF")
            elif step == "flush":
                usage.flush()
            elif step == "start another":
                running.append(UsageCounters(database))
            else:
                (kill if step == "kill" else UsageCounters.close)(running.pop())
                running = running or [UsageCounters(database)]
            assert billed(database) == true
        for usage in running:
            usage.close()
        UsageCounters(database).close()
        assert billed(database) == true
        assert files(database) == 0


@pytest.mark.parametrize("slots", [2, 4])
def test_a_full_journal_is_replaced(slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of more tenants than there are slots are in memory until the next commit, and none is lost after it."""
    monkeypatch.setattr(usage_journal, "_SLOTS", slots)
    database, true = tmp_path / "usage.sqlite", Counter[str]()
    usage = UsageCounters(database)
    for tenant in (*TENANTS, *TENANTS):
        count(usage, tenant)
        true[tenant.name] += 1
    usage.settle()
    assert billed(database) == true
    for _ in range(3):
        count(usage, TENANTS[4])
        true["erin"] += 1
        assert billed(database) == true
        usage.settle()
    assert files(database) == len(usage._journals) == 1
    kill(usage)
    UsageCounters(database).close()
    assert billed(database) == true


def test_a_deleted_journal_is_replaced(tmp_path: Path) -> None:
    database = tmp_path / "usage.sqlite"
    usage = UsageCounters(database)
    (tmp_path / usage._journals[0].name).unlink()
    count(usage, TENANTS[0])
    usage.settle()
    count(usage, TENANTS[0])
    kill(usage)
    assert billed(database) == {"alice": 2}


def test_an_earlier_copy_of_the_file_gets_the_later_counts_again(tmp_path: Path) -> None:
    database = tmp_path / "usage.sqlite"
    usage = UsageCounters(database)
    count(usage, TENANTS[0])
    usage.flush()
    copy = database.read_bytes()
    count(usage, TENANTS[0])
    usage.settle()
    kill(usage)
    for name in ("-wal", "-shm"):
        database.with_name(database.name + name).unlink(missing_ok=True)
    database.write_bytes(copy)
    UsageCounters(database).close()
    assert billed(database) == {"alice": 2}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "usage.sqlite", fields=2)


def found(journal: Journal, folder: Path) -> list[tuple[tuple[str, ...] | None, tuple[int, ...]]]:
    with journals(folder / "usage.sqlite", fields=2) as readers:
        (reader,) = readers
        return list(reader.totals())


def test_a_process_that_is_killed_while_it_counts_leaves_the_totals_before(journal: Journal, tmp_path: Path) -> None:
    """The sequence number is the last thing that is written."""
    path = tmp_path / journal.name
    for expected in [(1, 10), (2, 20), (3, 30)]:
        before = path.read_bytes()
        journal.add(KEY, (1, 10))
        assert found(journal, tmp_path) == [(KEY, expected)]
        after = path.read_bytes()
        path.write_bytes(before[:8] + after[8:])
        earlier = [(KEY, (expected[0] - 1, expected[1] - 10))] if expected[0] > 1 else []
        assert found(journal, tmp_path) == earlier
        path.write_bytes(after)
    journal.close(remove=True)


def test_totals_have_a_largest_value(journal: Journal, tmp_path: Path) -> None:
    for _ in range(2):
        journal.add(KEY, (1, usage_journal.MOST))
    assert found(journal, tmp_path) == [(KEY, (2, usage_journal.MOST))]
    journal.close(remove=True)


def test_a_journal_belongs_to_its_process_until_it_ends(journal: Journal, tmp_path: Path) -> None:
    with journals(tmp_path / "usage.sqlite", fields=2) as (reader,):
        assert not reader.lock()
        journal.close(remove=False)
        assert reader.lock()
        (tmp_path / journal.name).unlink()
        assert not reader.lock()


@pytest.mark.parametrize("kept", [0, 7, 700])
def test_what_a_power_cut_leaves_of_a_journal_can_be_read(kept: int, journal: Journal, tmp_path: Path) -> None:
    for name in ("alice", "bob"):
        journal.add((name,), (1, 2))
    journal.close(remove=False)
    path = tmp_path / journal.name
    path.write_bytes(path.read_bytes()[:kept])
    assert found(journal, tmp_path) == [(("alice",), (1, 2))][: kept // 512]


@pytest.mark.parametrize("damage", ["key", "length", "negative", "short key", "note", "note's totals"])
def test_a_damaged_slot_or_note_stops_neither_the_bill_nor_the_counting(damage: str, tmp_path: Path) -> None:
    """One damaged slot hid all later slots, or stopped the bill and the next start."""
    database = tmp_path / "usage.sqlite"
    usage = UsageCounters(database)
    for tenant in TENANTS[:3]:
        count(usage, tenant)
    name = usage._journals[-1].name
    kill(usage)
    path, slot = database.with_name(name), usage_journal._SLOT_BYTES
    content, at = bytearray(path.read_bytes()), usage_journal._SEQUENCE.size + 2 * 8 * len(COUNTED)
    if damage == "key":
        content[slot + at + 8] = 0xC1  # no type of msgpack
    elif damage == "length":
        content[slot + at : slot + at + 8] = b"\xff" * 8
    elif damage == "negative":
        content[slot + 8 : slot + at] = b"\xff" * (at - 8)
    elif damage == "short key":
        content[slot + at : slot + at + 8] = len(msgspec.msgpack.encode(KEY[:3])).to_bytes(8, "little")
        content[slot + at + 8 : slot + at + 8 + 64] = msgspec.msgpack.encode(KEY[:3]).ljust(64, b"\0")
    path.write_bytes(content)
    if damage.startswith("note"):
        note = b"\xc1" if damage == "note" else msgspec.msgpack.encode([(1,)])
        with contextlib.closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("UPDATE journals SET settled = ?", (note,))
    said: list[str] = []
    left = {"alice": 1, "carol": 1} if not damage.startswith("note") else {}
    assert {row["tenant"]: row["requests"] for row in read(database, damaged=said.append)} == left
    assert len(said) == 1
    assert name in said[0]
    if left:
        with contextlib.closing(UsageCounters(database)):
            assert billed(database) == left


def test_nothing_but_files_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "usage.sqlite.counts-fifo")
    with contextlib.closing(UsageCounters(tmp_path / "usage.sqlite")) as usage:
        count(usage, TENANTS[0])
        assert billed(tmp_path / "usage.sqlite") == {"alice": 1}
