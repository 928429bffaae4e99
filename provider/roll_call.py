"""Who of a group of ranks is alive: every rank's heart beats in the group's store, also while it waits for the others.

A collective that fails says that somebody is missing, and not who. A process that was killed or stopped has no
heartbeat; one that waits for it in a collective has.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, and not in __all__

_BEAT_S = 0.5
_PATIENCE_S = 3.0  # without a beat


class RollCall:
    """One rank's heartbeat, and a look at everybody's.

    Args:
        rank: of this process.
        world: how many there are. The store is torchrun's (`MASTER_ADDR`, `MASTER_PORT`).
    """

    def __init__(self, *, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._mine, self._look = self._connect(), self._connect()
        self._closed = threading.Event()
        self._mine.add(f"beats/{rank}", 1)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def absent(self) -> list[int]:
        """Ranks whose heart does not beat; takes a few seconds."""
        try:
            before = self._beats()
            time.sleep(_PATIENCE_S)
            return [rank for rank, (was, now) in enumerate(zip(before, self._beats(), strict=True)) if was == now]
        except (RuntimeError, OSError):  # the store has gone with the group
            return []

    def close(self) -> None:
        """Stop."""
        self._closed.set()

    def _beats(self) -> list[int]:
        return [self._look.add(f"beats/{rank}", 0) for rank in range(self._world)]

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_S):
            try:
                self._mine.add(f"beats/{self._rank}", 1)
            except (RuntimeError, OSError):
                return

    def _connect(self) -> Store:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10 * _PATIENCE_S))
        return PrefixStore(f"symbiosis-priv/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)
