"""Every count is on the bill once, whenever a provider is killed."""

import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings, strategies as st

from provider.gateway import usage
from provider.gateway.usage import UsageCounters, UsageCounts, read
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.network.tls import TenantIdentity

STRANGER = 12_345  # a user id
TENANTS = [TenantIdentity(name, authority="sha256:a") for name in ("alice", "bob", "carol", "dave", "erin")]


def kill(counters: UsageCounters) -> None:
    """Leave the files as SIGKILL leaves them: descriptors and locks are gone, nothing else is written."""
    assert counters._flusher.close(20)
    for each in counters._logs:
        each.close(remove=False)
    counters._connection.close()


def count(counters: UsageCounters, tenant: TenantIdentity) -> None:
    counters.count(tenant, "executor", UsageCounts(requests=1, rows=7))


def billed(database: Path) -> Counter[str]:
    bill = list(read(database))
    assert all(row["rows"] == 7 * int(row["requests"]) for row in bill)
    return Counter({str(row["tenant"]): int(row["requests"]) for row in bill})


def files(database: Path) -> int:
    """Number of logs."""
    return len(usage._logs_of(database))


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal", ".log-0123"])
def test_a_file_that_another_user_plants_is_named(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sticky folder such as /tmp, any user can add a file, with counts that are forged."""
    database, planted = tmp_path / "usage.sqlite", tmp_path / f"usage.sqlite{end}"
    planted.touch()
    if os.geteuid() == 0:
        os.chown(planted, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with pytest.raises(ConfigError, match=f"{end} belongs to another user"):
        UsageCounters(database)
    with pytest.raises(ConfigError, match=f"{end} belongs to another user"):
        list(read(database))
    assert planted.exists()


def test_counts_of_an_earlier_release_are_not_lost_silently(tmp_path: Path) -> None:
    (tmp_path / "usage.sqlite.counts-0123").touch()
    with pytest.raises(ConfigError, match="Start that release once"):
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
            counters = running[-1]
            if isinstance(step, int):
                count(counters, TENANTS[step])
                true[TENANTS[step].name] += 1
            elif step == "settle":
                counters.settle()
            elif step == "busy":
                counters._connection.execute("PRAGMA query_only = ON")
                counters.settle()
                counters._connection.execute("PRAGMA query_only = OFF")
            elif step == "flush":
                counters.flush()
            elif step == "start another":
                running.append(UsageCounters(database))
            else:
                (kill if step == "kill" else UsageCounters.close)(running.pop())
                running = running or [UsageCounters(database)]
            assert billed(database) == true
        for counters in running:
            counters.close()
        UsageCounters(database).close()
        assert billed(database) == true
        assert files(database) == 0


@pytest.mark.parametrize("size", [200, 500])
def test_a_full_log_is_replaced(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that do not fit are in memory until the next commit, and none is lost after it."""
    monkeypatch.setattr(usage, "_LOG_BYTES", size)
    database, true = tmp_path / "usage.sqlite", Counter[str]()
    counters = UsageCounters(database)
    for tenant in (*TENANTS, *TENANTS):
        count(counters, tenant)
        true[tenant.name] += 1
    counters.settle()
    assert billed(database) == true
    count(counters, TENANTS[4])
    true["erin"] += 1
    assert billed(database) == true
    counters.settle()
    assert files(database) == len(counters._logs) == 1
    kill(counters)
    UsageCounters(database).close()
    assert billed(database) == true
    assert files(database) == 0


def test_an_earlier_copy_of_the_file_gets_the_later_counts_again(tmp_path: Path) -> None:
    database = tmp_path / "usage.sqlite"
    counters = UsageCounters(database)
    count(counters, TENANTS[0])
    counters.flush()
    copy = database.read_bytes()
    count(counters, TENANTS[0])
    counters.settle()
    kill(counters)
    for name in ("-wal", "-shm"):
        database.with_name(database.name + name).unlink(missing_ok=True)
    database.write_bytes(copy)
    UsageCounters(database).close()
    assert billed(database) == {"alice": 2}


@pytest.mark.parametrize("damage", ["cut", "newline", "bytes", "negative", "fields", "power cut"])
def test_a_damaged_line_stops_neither_the_bill_nor_the_counting(damage: str, tmp_path: Path) -> None:
    """A process that is killed within a line, a power cut, and a bad disk."""
    database = tmp_path / "usage.sqlite"
    counters = UsageCounters(database)
    for tenant in TENANTS[:3]:
        count(counters, tenant)
    path = counters._logs[0].path
    kill(counters)
    lines = path.read_bytes().rstrip(b"\0").splitlines(keepends=True)
    if damage == "cut":  # the newline is written last
        lines[1:] = [lines[1][:-1] + bytes(300)]
    elif damage == "newline":
        lines[1] = lines[1][:-1] + b" "
    elif damage == "bytes":
        lines[1] = b"\xff\0{[" + lines[1][4:]
    elif damage == "negative":
        lines[1] = lines[1].replace(b"7", b"-7")
    elif damage == "fields":
        lines[1] = lines[1].replace(b"[1,", b"[")
    else:
        lines[1:] = [bytes(5000)]
    path.write_bytes(b"".join(lines))
    left = {"alice": 1} | ({"carol": 1} if damage in ("bytes", "negative", "fields") else {})
    said: list[str] = []
    assert {row["tenant"]: row["requests"] for row in read(database, damaged=said.append)} == left
    assert len(said) == (damage not in ("cut", "power cut"))
    counters = UsageCounters(database)
    count(counters, TENANTS[4])
    counters.close()
    assert billed(database) == left | {"erin": 1}
    assert files(database) == 0


def test_a_log_belongs_to_its_process_until_it_ends(tmp_path: Path) -> None:
    first, second = UsageCounters(tmp_path / "usage.sqlite"), UsageCounters(tmp_path / "usage.sqlite")
    assert files(tmp_path / "usage.sqlite") == 2
    kill(first)
    UsageCounters(tmp_path / "usage.sqlite").close()
    assert usage._logs_of(tmp_path / "usage.sqlite") == [each.path for each in second._logs]
    second.close()


def test_sums_have_a_largest_value(tmp_path: Path) -> None:
    counters = UsageCounters(tmp_path / "usage.sqlite")
    for _ in range(3):
        counters.count(TENANTS[0], "executor", UsageCounts(requests=1, work=usage._MOST))
        counters.settle()
    assert counters.unwritten_s == 0
    counters.close()
    (bill,) = read(tmp_path / "usage.sqlite")
    assert (bill["requests"], bill["work"]) == (3, usage._MOST)


def test_nothing_but_files_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "usage.sqlite.log-fifo")
    with pytest.raises(ConfigError, match="no regular file"):
        UsageCounters(tmp_path / "usage.sqlite")
