"""Who of a group of ranks is alive: every rank's heart beats in the group's store, also while it waits for the others.

A collective that fails says that somebody is missing, and not who; one that waits says nothing until the group's
timeout. A process that was killed or stopped has no heartbeat; one that waits in a collective has. So rank 0 watches
every heart, and the others watch that of rank 0: a group in which one has stopped ends within seconds.

What counts are beats, not seconds: a machine that was asleep has not lost anybody.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, and not in __all__

_BEAT_S = 0.5
_MISSED = 10  # beats of one's own without one of the other's
_PATIENCE_S = 3.0  # after a collective has failed
_LEAD = 0


class RollCall:
    """One rank's heartbeat, and a look at everybody's.

    Args:
        rank: of this process.
        world: how many there are. The store is torchrun's (`MASTER_ADDR`, `MASTER_PORT`).
        lost: told once, in a thread of its own, whose hearts have stopped; nobody's if the store itself is gone.
    """

    def __init__(self, *, rank: int, world: int, lost: Callable[[list[int]], None]) -> None:
        self._rank, self._world, self._lost = rank, world, lost
        self._mine, self._look = self._connect(), self._connect()
        self._closed = threading.Event()
        self._mine.set(_process(rank), f"{_machine()} {os.getpid()}")
        self._mine.add(f"beats/{rank}", 1)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # also where an error ends the process

    def absent(self) -> list[int]:
        """Ranks whose heart does not beat; takes a few seconds."""
        everybody = range(self._world)
        try:
            before = [_beats(self._look, rank) for rank in everybody]
            time.sleep(_PATIENCE_S)
            return [rank for rank in everybody if _beats(self._look, rank) == before[rank]]
        except (RuntimeError, OSError):  # the store has gone with the group
            return []

    def end(self, absent: Collection[int]) -> None:
        """Kill those of them that are on this machine: who is stopped would keep torchrun waiting for half a minute."""
        with contextlib.suppress(RuntimeError, OSError):
            for rank in absent:
                machine, process = self._look.get(_process(rank)).decode().split()
                if machine == _machine():
                    os.kill(int(process), signal.SIGKILL)

    def close(self) -> None:
        """Stop. A process that ended while its heart is in the store would be aborted, and be taken for lost."""
        self._closed.set()
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        watched = [rank for rank in range(self._world) if rank != self._rank and _LEAD in (rank, self._rank)]
        heard, missed = dict.fromkeys(watched, 0), dict.fromkeys(watched, 0)
        while not self._closed.wait(_BEAT_S):
            try:
                self._mine.add(f"beats/{self._rank}", 1)
                for rank in watched:
                    before, heard[rank] = heard[rank], _beats(self._mine, rank)
                    silent = 0 < heard[rank] == before  # who has not come yet is waited for elsewhere
                    missed[rank] = missed[rank] + 1 if silent else 0
            except (RuntimeError, OSError):
                if not self._closed.is_set():
                    self._lost([])
                return
            if absent := [rank for rank in watched if missed[rank] >= _MISSED]:
                self._lost(absent)
                return

    def _connect(self) -> Store:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10 * _PATIENCE_S))
        return PrefixStore(f"symbiosis-priv/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)


def _process(rank: int) -> str:
    return f"process/{rank}"


def _machine() -> str:
    """Which torchrun has started this process."""
    return os.environ["GROUP_RANK"]


def _beats(store: Store, rank: int) -> int:
    return store.add(f"beats/{rank}", 0)
