"""Heartbeats continue during any work of the rank, and end before its process ends."""

import threading
from pathlib import Path

import pytest

from provider.shards import heartbeats
from provider.shards.heartbeats import Heartbeats
from provider.shards.rendezvous import FileCounters


def test_the_thread_ends_when_heartbeats_are_closed(tmp_path: Path) -> None:
    def lost(ranks: list[int]) -> None:
        raise AssertionError(ranks)

    beats = Heartbeats(rank=0, world=1, counters=FileCounters(tmp_path), lost=lost)
    assert "heartbeat" in {thread.name for thread in threading.enumerate()}
    beats.close()
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}
    beats.close()


def test_only_the_stopped_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "_BEAT_S", 0.01)
    monkeypatch.setattr(heartbeats, "_PATIENCE_S", 0.2)
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
    monkeypatch.setattr(heartbeats, "_BEAT_S", 0.01)
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
