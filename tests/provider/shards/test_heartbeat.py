"""A rank's heart: it beats beside whatever the rank does, and ends before its process does."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in __all__

from provider.shards.heartbeat import RollCall


def test_a_closed_roll_call_has_left_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python aborts a process that ends while one of its threads is inside torch."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)

    def lost(ranks: list[int]) -> None:
        raise AssertionError(ranks)

    roll_call = RollCall(rank=0, world=1, lost=lost)
    assert "heartbeat" in {thread.name for thread in threading.enumerate()}
    roll_call.close()
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}
    roll_call.close()
