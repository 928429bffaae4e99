"""Every count is on the bill once, and a provider that is killed loses the last second of counts at most."""

import contextlib
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings, strategies as st

from provider.gateway import usage
from provider.gateway.usage import UsageCounters, UsageCounts, read
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.network.tls import TenantIdentity
from tests.warm import Popen

ANOTHER_USER = 12_345
ALICE, BOB, CAROL = (TenantIdentity(name, authority="sha256:a") for name in ("alice", "bob", "carol"))
TENANTS = [ALICE, BOB, CAROL]


@pytest.fixture(autouse=True)
def commits_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_COMMIT_S", 600.0)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "usage.sqlite"


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def count(counters: UsageCounters, tenant: TenantIdentity) -> None:
    counters.count(tenant, "executor", UsageCounts(requests=1, rows=7))


def billed(database: Path) -> Counter[str]:
    bill = list(read(database))
    assert all(row["rows"] == 7 * int(row["requests"]) for row in bill)
    return Counter({str(row["tenant"]): int(row["requests"]) for row in bill})


@settings(max_examples=12, deadline=None)
@example(steps=[TENANTS[0], "settle", TENANTS[0], "settle"])
@given(
    steps=st.lists(
        st.sampled_from(TENANTS) | st.sampled_from(["settle", "locked", "full", "kill", "stop", "start"]), max_size=20
    )
)
def test_every_count_is_on_the_bill_once(steps: list[TenantIdentity | str]) -> None:
    """For any ends and starts, with commits that fail, and with several providers at one file."""
    with TemporaryDirectory() as folder:
        database = Path(folder) / "usage.sqlite"
        running, committed = [(UsageCounters(database), Counter[str]())], Counter[str]()
        for step in steps:
            counters, new = running[-1]
            if isinstance(step, TenantIdentity):
                count(counters, step)
                new[step.name] += 1
            elif step == "settle":
                counters.settle()
                committed += new
                new.clear()
            elif step == "locked":
                with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as holder:
                    holder.execute("BEGIN IMMEDIATE")
                    counters.settle()
            elif step == "full":
                with full_disk():
                    counters.settle()
            elif step == "start":
                running.append((UsageCounters(database), Counter()))
            else:
                running.pop()
                if step == "stop":
                    counters.close()
                    committed += new
                running = running or [(UsageCounters(database), Counter())]
            if step in ("settle", "locked", "full"):
                assert (counters.unwritten_s > 0) == (step != "settle" and new.total() > 0)
            assert billed(database) == committed
        for counters, new in running:
            counters.close()
            committed += new
        assert billed(database) == committed


COUNTING = """
import sys
from pathlib import Path
from provider.gateway.usage import UsageCounters, UsageCounts
from symbiosis_priv.network.tls import TenantIdentity
counters = UsageCounters(Path(sys.argv[1]))
while True:
    counters.count(TenantIdentity(sys.argv[2], authority="sha256:a"), "executor", UsageCounts(requests=1, rows=7))
    print(end="+", flush=True)
    counters.settle()
    print(end="." if not counters.unwritten_s else "", flush=True)
"""


def test_a_killed_process_loses_what_it_has_not_committed(database: Path) -> None:
    """Two processes at one file, which are killed at any place of a commit."""
    processes = {
        name: Popen([sys.executable, "-c", COUNTING, str(database), name], stdout=subprocess.PIPE)
        for name in ("alice", "bob")
    }
    least, most = {}, {}
    for name, process in processes.items():
        assert process.stdout is not None
        said = process.stdout.read(40)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(20)
        with process.stdout:
            said += process.stdout.read()
        most[name] = said.count(b"+")
        least[name] = said[: said.rfind(b".")].count(b"+")
        assert least[name] > 0
    found = billed(database)
    assert all(least[name] <= found[name] <= most[name] for name in processes), (least, found, most)
    counters = UsageCounters(database)
    count(counters, CAROL)
    counters.close()
    assert billed(database) == found + Counter(carol=1)


def test_providers_that_make_a_file_at_the_same_time_all_start(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def start(database: Path) -> None:
        together.wait(20)
        UsageCounters(database).close()

    with ThreadPoolExecutor(4) as threads:
        for run in range(20):
            list(threads.map(start, [tmp_path / f"{run}.sqlite"] * 4))


def test_a_provider_commits_every_second(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert usage._COMMIT_S == 1.0
    counters = UsageCounters(database)
    count(counters, ALICE)
    end = time.monotonic() + 20
    while not billed(database) and time.monotonic() < end:
        time.sleep(0.02)
    assert billed(database) == {"alice": 1}
    counters.close()


@pytest.mark.parametrize("change", ["deleted", "moved", "replaced"])
def test_a_file_that_was_moved_is_made_again(database: Path, change: str) -> None:
    """Nothing is written to the old file, and no count is lost."""
    counters = UsageCounters(database)
    count(counters, ALICE)
    counters.settle()
    before = database.read_bytes()
    old = database.rename(database.with_name("old.sqlite"))
    if change == "deleted":
        old.unlink()
    elif change == "replaced":
        database.touch()
    for tenant in (ALICE, BOB):
        count(counters, tenant)
    counters.close()
    assert billed(database) == {"alice": 1, "bob": 1}
    assert change == "deleted" or old.read_bytes() == before


def test_a_damaged_file_is_an_error_and_no_count_is_lost(database: Path) -> None:
    counters = UsageCounters(database)
    count(counters, ALICE)
    counters.settle()
    whole = database.read_bytes()
    os.truncate(database, 100)
    count(counters, ALICE)
    counters.settle()
    assert counters.unwritten_s > 0
    with pytest.raises(ConfigError, match="is not a provider's usage database"):
        list(read(database))
    assert counters.totals() == {(ALICE, "executor"): UsageCounts(requests=2, rows=14)}
    database.write_bytes(whole)
    counters.close()
    assert counters.unwritten_s == 0
    assert billed(database) == {"alice": 2}


def test_an_unusable_database_is_an_error_at_the_start(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged, of a later release, another file, or on a full disk: no tenant is served without a bill."""
    monkeypatch.setattr(usage, "_LOCK_AT_START_S", 0.25)
    counters = UsageCounters(database)
    for number in range(300):
        count(counters, TenantIdentity(f"tenant-{number}", authority="sha256:a"))
    counters.close()
    data = database.read_bytes()
    (tmp_path / "junk").write_bytes(b"nothing of SQLite's" * 100)
    (tmp_path / "damaged").write_bytes(data[:8192] + bytes(4096) + data[8192 + 4096 :])
    (tmp_path / "short").write_bytes(data[:-4096])
    for name, change in (("later", "PRAGMA user_version = 3"), ("other", "ALTER TABLE usage ADD COLUMN more INTEGER")):
        (tmp_path / name).write_bytes(data)
        with contextlib.closing(sqlite3.connect(tmp_path / name)) as connection:
            connection.execute(change)
    (tmp_path / "folder").mkdir()
    for name in ("junk", "damaged", "short", "later", "other", "folder"):
        with pytest.raises(ConfigError, match="choose another file"):
            UsageCounters(tmp_path / name)
    monkeypatch.setattr(usage, "_LOCK_AT_START_S", 60.0)  # a full disk is no lock, and is not waited for
    began = time.monotonic()
    with full_disk(), pytest.raises(ConfigError, match="free disk space"):
        UsageCounters(database)
    assert time.monotonic() - began < 20
    UsageCounters(database).close()


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
def test_a_file_that_another_user_plants_is_named(database: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sticky folder such as /tmp, any user can add a file, with counts that are forged."""
    planted = database.with_name(database.name + end)
    planted.touch()
    if os.geteuid() == 0:
        os.chown(planted, ANOTHER_USER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: ANOTHER_USER)
    for use in (UsageCounters, lambda path: list(read(path))):
        with pytest.raises(ConfigError, match=f"{end} belongs to another user"):
            use(database)
    planted.unlink()
    os.mkfifo(planted)
    with pytest.raises(ConfigError, match="no regular file"):
        UsageCounters(database)


@pytest.mark.parametrize("end", [".log-0123", ".counts-0123"])
def test_counts_of_an_earlier_release_are_not_lost_silently(database: Path, end: str) -> None:
    database.with_name(database.name + end).touch()
    with pytest.raises(ConfigError, match="Start that release once"):
        UsageCounters(database)
