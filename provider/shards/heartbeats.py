"""Heartbeats of a group of ranks: each rank increments a counter, and other ranks watch the counter.

An error of a collective does not name the missing rank, and a collective that waits raises no error before the group's
timeout. A process that was killed or stopped has no heartbeat; a process that waits in a collective has one. Rank 0
watches all other ranks, and the other ranks watch rank 0. A group in which one rank has stopped therefore ends within
seconds.

A rank is lost if its counter does not change during ten beats of the watching rank. Beats are counted instead of
seconds, so that a machine that was suspended does not lose a rank.
"""

import atexit
import threading
import time
from collections.abc import Callable
from typing import Protocol

_BEAT_S = 0.5
_MISSED = 10  # beats of the watching rank without a beat of the watched rank
_PATIENCE_S = 3.0  # `absent` waits this long for a beat of every rank
_LEAD = 0


class Counters(Protocol):
    """Numbers that all ranks can read (`rendezvous.counters`)."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter that starts at 0, and return the sum. OSError or RuntimeError if the store is gone."""


class Heartbeats:
    """Sends the heartbeat of this rank, and watches other ranks. `lost` is called once, in the heartbeat's thread, with
    the ranks whose heartbeat has stopped; with an empty list if the counters cannot be reached any more."""

    def __init__(self, *, rank: int, world: int, counters: Counters, lost: Callable[[list[int]], None]) -> None:
        self._rank, self._world, self._counters, self._lost = rank, world, counters, lost
        self._closed = threading.Event()
        self._beats(rank, 1)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # also when an error ends the process

    def absent(self) -> list[int]:
        """Ranks without a heartbeat. Takes three seconds. Empty if the counters cannot be reached."""
        ranks = range(self._world)
        try:
            before = [self._beats(rank) for rank in ranks]
            time.sleep(_PATIENCE_S)
            return [rank for rank in ranks if self._beats(rank) == before[rank]]
        except (RuntimeError, OSError):  # the store has gone with the group
            return []

    def close(self) -> None:
        """Stop the thread. Python aborts a process that ends while one of its threads is inside torch."""
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
                    silent = 0 < heard[rank] == before  # a rank without a first beat is still starting
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
