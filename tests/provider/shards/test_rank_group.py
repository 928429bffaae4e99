"""Ranks on one machine meet in a folder; heartbeats last as long as a rank's process; a rank that ends its group kills
its own torchrun with all of its ranks, and no other process.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from provider.shards import rank_group
from provider.shards.rank_group import FileCounters, Heartbeats
from tests.provider.processes import has_ended
from tests.waiting import until


def test_only_the_stopped_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "_BEAT_S", 0.01)
    monkeypatch.setattr(rank_group, "_PATIENCE_S", 0.2)
    found: list[int] = []
    told = threading.Event()

    def lost(ranks: list[int]) -> None:
        found.extend(ranks)
        told.set()

    counters = FileCounters(tmp_path)
    counters.add("beats/2", 1)  # called once only
    follower = Heartbeats(rank=1, world=3, counters=counters, lost=lambda ranks: None)
    lead = Heartbeats(rank=0, world=3, counters=FileCounters(tmp_path), lost=lost)
    assert told.wait(30)
    assert found == [2]
    assert follower.absent() == [0, 2]  # rank 0 has stopped by now: a process that has lost a rank ends
    for beats in (lead, follower):
        beats.close()


def test_unreachable_counters_mean_that_the_group_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "_BEAT_S", 0.01)
    folder = tmp_path / "meeting"
    folder.mkdir()
    found: list[list[int]] = []
    told = threading.Event()

    def lost(ranks: list[int]) -> None:
        found.append(ranks)
        told.set()

    beats = Heartbeats(rank=0, world=2, counters=FileCounters(folder), lost=lost)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert told.wait(30)
    assert found == [[]]
    assert beats.absent() == []
    beats.close()


@given(steps=st.lists(st.tuples(st.sampled_from(["beats/0", "beats/1"]), st.integers(0, 5)), max_size=20))
def test_counters_count_and_do_not_grow(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer, reader = FileCounters(Path(folder)), FileCounters(Path(folder))
        totals = {"beats/0": 0, "beats/1": 0}
        for key, amount in steps:
            totals[key] += amount
            assert writer.add(key, amount) == totals[key]
            assert {name: reader.add(name, 0) for name in totals} == totals
        for file in Path(folder).iterdir():
            assert file.stat().st_size <= 8
            assert not file.stat().st_mode & 0o077


# Two ranks, of which the first stops; torchrun (this script) does not notice it.
GROUP = """
import os, signal, subprocess, sys, time
from provider.shards import rank_group
if len(sys.argv) > 1:
    rank_group.end_with_torchrun()
    os.write(1, f'{os.getpid()}\\n'.encode())
    if sys.argv[1] == "0":
        os.kill(os.getpid(), signal.SIGSTOP)
    sys.stdin.readline()
    rank_group.kill_torchrun()
    time.sleep(60)
else:
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank)]) for rank in (0, 1)]
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a rank cannot end with its parent")
def test_the_whole_group_ends_and_nothing_else(tmp_path: Path) -> None:
    script = tmp_path / "group.py"
    script.write_text(GROUP, encoding="utf-8")
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    group = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ}
    )
    assert group.stdin is not None
    assert group.stdout is not None
    assert bystander.stdin is not None
    ranks = [int(group.stdout.readline()) for _ in range(2)]
    group.stdin.write(b"now\n")
    group.stdin.flush()
    assert group.wait(30) == -signal.SIGKILL
    until(lambda: all(map(has_ended, ranks)))
    assert bystander.poll() is None
    for pipe in (group.stdin, group.stdout, bystander.stdin):
        pipe.close()
    bystander.wait(30)


@pytest.mark.parametrize("parent", [None, -1, 0, 1, "this process"])
def test_only_the_parent_is_killed(parent: int | str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remembered process id is killed only if the kernel reports it as the parent's."""
    monkeypatch.setattr(rank_group, "_parent", os.getpid() if parent == "this process" else parent)
    killed: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda process, number: killed.append(process))
    rank_group.kill_torchrun()
    assert not killed


FLOODED = """
import sys
from provider.shards import rank_group
from tests.waiting import until
rank_group.limit_memory(64 << 20)
kept = []
try:
    for _ in range(1024):
        kept.append(bytes(1 << 20))
except MemoryError:
    sys.exit(len(kept))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what is used")
def test_data_sent_to_a_store_cannot_fill_the_memory() -> None:
    megabytes = subprocess.run([sys.executable, "-c", FLOODED], check=False, timeout=60).returncode
    assert 40 <= megabytes <= 64
