"""Heartbeats of a group of ranks: each rank counts up, also while it waits in a collective, and others look.

A collective that fails does not say which rank is missing, and one that waits says nothing until the group's timeout.
A process that was killed or stopped has no heartbeat; a process that waits in a collective has one. Rank 0 watches
all others, and the others watch rank 0, so a group in which one rank has stopped ends within seconds.

A rank is missing after ten beats of the watching rank without one of its own. Beats are counted and not seconds: a
machine that was suspended has not lost a rank.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Protocol

_BEAT_S = 0.5
_MISSED = 10  # beats of one's own without one of the other's
_PATIENCE_S = 3.0  # after a collective has failed
_LEAD = 0


class Counters(Protocol):
    """Numbers that all ranks can read (`rendezvous.counters`)."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number that begins with 0, and return the sum. OSError or RuntimeError if the store is gone."""


class Heartbeats:
    """The heartbeat of this rank, and a watch over the others'.

    Args:
        rank: of this process.
        world: number of ranks.
        counters: shared by all ranks.
        lost: called once, in its own thread, with the ranks whose heartbeat has stopped; with none of them if the
            counters cannot be reached any more.
    """

    def __init__(self, *, rank: int, world: int, counters: Counters, lost: Callable[[list[int]], None]) -> None:
        self._rank, self._world, self._counters, self._lost = rank, world, counters, lost
        self._closed = threading.Event()
        self._beats(rank, 1)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # also where an error ends the process

    def absent(self) -> list[int]:
        """Ranks without a heartbeat; takes three seconds. Empty if the counters cannot be reached."""
        everybody = range(self._world)
        try:
            before = [self._beats(rank) for rank in everybody]
            time.sleep(_PATIENCE_S)
            return [rank for rank in everybody if self._beats(rank) == before[rank]]
        except (RuntimeError, OSError):  # the store has gone with the group
            return []

    def close(self) -> None:
        """Stop. Python aborts a process that ends while one of its threads is inside torch."""
        self._closed.set()
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        watched = [rank for rank in range(self._world) if rank != self._rank and _LEAD in (rank, self._rank)]
        heard, missed = dict.fromkeys(watched, 0), dict.fromkeys(watched, 0)
        while not self._closed.wait(_BEAT_S):
            try:
                self._beats(self._rank, 1)
                for rank in watched:
                    before, heard[rank] = heard[rank], self._beats(rank)
                    silent = 0 < heard[rank] == before  # a rank that has not come yet is waited for elsewhere
                    missed[rank] = missed[rank] + 1 if silent else 0
            except (RuntimeError, OSError):
                if not self._closed.is_set():
                    self._lost([])
                return
            if absent := [rank for rank in watched if missed[rank] >= _MISSED]:
                self._lost(absent)
                return

    def _beats(self, rank: int, more: int = 0) -> int:
        return self._counters.add(f"beats/{rank}", more)
