"""Pads drawn ahead, in the background and within a memory budget.

A `PadPool` per (layer group, direction) draws pads for the next product while the current product waits for its answer.
If the pool is empty, it draws a pad immediately: the mask needs no request, and the effect is fetched while the
executor computes. Privacy does not depend on this module: a pad that was returned twice would raise `BurntRowError`
(`tenant.core.pads`).
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.errors import CertificateError, ProviderError, QuarantinedError, SymbiosisError, TransportError
from symbiosis_priv.limits import GroupIndex
from tenant.core.pads import EffectSource, Pad
from tenant.worker import Worker

log = logging.getLogger(__name__)

_MIN_BLOCK_ROWS, _MIN_BLOCK_BYTES = 64, 1 << 20
# An effect whose promise failed with one of these errors will not arrive.
_GONE = (TransportError, ProviderError, CertificateError, QuarantinedError)


@dataclass
class PoolMemory:
    """A memory budget in bytes, shared by the pools of a session."""

    limit: int
    used: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, size: int) -> bool:
        """Reserve memory. Returns False if less than `size` bytes are free."""
        with self.lock:
            if self.used + size > self.limit:
                return False
            self.used += size
            return True

    def release(self, size: int) -> None:
        """Release reserved memory."""
        with self.lock:
            self.used -= size


class PadPool:
    """Pads of one (layer group, direction), drawn ahead. Thread-safe: no lock is held while a pad is drawn.

    Args:
        refill: runs a refill in the background.
        memory: the shared budget.
        row_bytes: bytes of one pad row, which are those of its effects.
        max_rows: returns the largest number of rows of one draw, which depends on the providers in use.
    """

    def __init__(
        self,
        source: EffectSource,
        *,
        index: GroupIndex,
        direction: Direction,
        refill: Worker,
        memory: PoolMemory,
        row_bytes: int,
        max_rows: Callable[[], int],
    ) -> None:
        self._source = source
        self._index, self._direction = index, direction
        self._refill, self._memory, self._row_bytes = refill, memory, row_bytes
        self._max_rows = max_rows
        self._min_block = min(_MIN_BLOCK_ROWS, _MIN_BLOCK_BYTES // row_bytes)
        self._ready: deque[Pad] = deque()
        self._ahead = 0
        self._lock = threading.Lock()
        self.taken = self.dry = 0

    def take(self, rows: int) -> list[Pad]:
        """Return pads for `rows` rows in total. The pool does not keep them."""
        pads, missing = [], rows
        with self._lock:
            while missing and self._ready:
                pad = self._ready.popleft()
                if is_lost(pad):
                    self._release(pad.rows)
                    continue
                if pad.rows > missing:
                    pad, rest = pad.split(missing)
                    self._ready.appendleft(rest)
                pads.append(pad)
                missing -= pad.rows
            self._release(rows - missing)
            self.taken += rows
            self.dry += missing
        if missing:
            pads.append(self._source.draw(self._index, self._direction, missing, ahead=False))
        return pads

    def order(self, rows: int) -> None:
        """Draw pads in the background until `rows` rows are ready or being drawn, or until the memory budget is used
        up. For products of few rows, the pool draws many rows at a time, and draws again when half of them are left."""
        rows = max(rows, self._min_block // 2)
        if self._ahead >= rows:
            return
        block = min(max(rows, self._min_block), self._max_rows())
        while self._is_short_of(rows, block):
            self._refill.submit(self._draw_ahead, block)

    def ready(self) -> int:
        """Return the number of pad rows whose effects have arrived."""
        with self._lock:
            return sum(pad.rows for pad in self._ready if all(share.effect.done() for share in pad.shares))

    def _is_short_of(self, rows: int, block: int) -> bool:
        """Returns True if the pool needs another pad, and counts its rows as being drawn."""
        with self._lock:
            wanted = self._ahead < rows and self._memory.take(block * self._row_bytes)
            self._ahead += block if wanted else 0
            return wanted

    def _draw_ahead(self, rows: int) -> None:
        try:
            pad = self._source.draw(self._index, self._direction, rows, ahead=True)
        except SymbiosisError as error:
            log.warning("drawing pads ahead failed, the next step draws its own: %s", error)
            with self._lock:
                self._release(rows)
            return
        with self._lock:
            self._ready.append(pad)

    def _release(self, rows: int) -> None:
        self._ahead -= rows
        self._memory.release(rows * self._row_bytes)


def is_lost(pad: Pad) -> bool:
    """Returns True if an effect of the pad will never arrive, because its helper was lost, refused, or is quarantined.

    A malformed effect does not count as lost, so that the fault is found when the pad is used.
    """
    for share in pad.shares:
        try:
            if isinstance(share.effect.exception(timeout=0), _GONE):
                return True
        except TimeoutError:  # the effect is still being computed
            continue
    return False
