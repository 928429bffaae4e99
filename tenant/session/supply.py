"""The supply of pads, drawn ahead or when they are needed.

A `PadPool` per (layer group, direction) draws pads for the next product while the current product waits for its
answer, in the background and within a memory budget. If the pool is empty, it draws a pad immediately: the mask needs
no request, and the effect is fetched while the executor computes. Privacy does not depend on this module: a pad that
was returned twice would raise `BurntRowError` (`tenant.core.pads`).
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import (
    CertificateError,
    ProviderError,
    QuarantinedError,
    SymbiosisError,
    TransportError,
)
from symbiosis_priv.federation import Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.connections.executor_client import row_limit
from tenant.connections.helper_client import HelperClient
from tenant.core.masked import UNMASKED_BY_CHOICE, UnmaskedByChoice
from tenant.core.pads import EffectSource, Pad, PadOrder, SessionSecret
from tenant.core.parts import MOST_FEW
from tenant.masking.scheme import Materials, SessionScheme
from tenant.options import SessionOptions
from tenant.preparation.prepared import Preparation
from tenant.routing.known_provider import KnownProvider
from tenant.routing.routes import Routes
from tenant.worker import Worker

log = logging.getLogger(__name__)

_LEAST_ROWS, _BLOCK_BYTES = 64, 1 << 20  # of a block for few rows, because a row costs helpers less in a large one
_PRODUCTS, _MOST_ROWS = 32, 256  # that a block lasts for, if it takes no more rows than that
# An effect whose promise failed with one of these errors will not arrive.
_GONE = (TransportError, ProviderError, CertificateError, QuarantinedError)


class Supply:
    """Draws the pads of one process, ahead or when they are needed. Thread-safe. `source`: draws pads; None if the
    scheme returned `UNMASKED_BY_CHOICE`."""

    def __init__(
        self,
        preparation: Preparation,
        scheme: SessionScheme,
        options: SessionOptions,
        store: WeightStore | None,
        routes: Routes,
        *,
        secret: SessionSecret,
        helpers: Mapping[KnownProvider, HelperClient],
    ) -> None:
        self.refill = Worker("refill")
        self._facts, self._routes, self._helpers = preparation.facts, routes, helpers
        self._memory = PoolMemory(options.pool_memory)
        self._pools: dict[tuple[GroupIndex, Direction], PadPool] = {}
        materials = Materials(preparation=preparation, secret=secret, holders=self._holders, store=store)
        effects = scheme.effects(materials)
        self.source = None if isinstance(effects, UnmaskedByChoice) else effects

    @property
    def pools(self) -> tuple["PadPool", ...]:
        return tuple(self._pools.values())

    def take(
        self, index: GroupIndex, direction: Direction, rows: int, *, counts: Counts | None = None
    ) -> Sequence[Pad]:
        """Return fresh pads for `rows` rows; `UNMASKED_BY_CHOICE` for a scheme without pads. Pads for rows with counts
        are drawn now."""
        if self.source is None:
            return UNMASKED_BY_CHOICE
        if counts is not None:
            return [self.source.draw(PadOrder(index, direction, rows, counts))]
        if (pool := self._pools.get((index, direction))) is None:
            pool = self._new_pool(index, direction, self.source)
        return pool.take(rows)

    def take_ready(self, index: GroupIndex, direction: Direction, rows: int, *, most: int) -> Sequence[Pad] | None:
        """See `PadPool.take_ready`."""
        if self.source is None:
            return UNMASKED_BY_CHOICE
        pool = self._pools.get((index, direction))
        return None if pool is None else pool.take_ready(rows, most)

    def order(self, index: GroupIndex, direction: Direction, rows: int) -> None:
        """See `PadPool.order`."""
        if self.source is not None:
            pool = self._pools.get((index, direction)) or self._new_pool(index, direction, self.source)
            pool.order(rows)

    def draw(self, order: PadOrder) -> Pad:
        """Draw a fresh pad."""
        assert self.source is not None
        return self.source.draw(order)

    def _new_pool(self, index: GroupIndex, direction: Direction, source: EffectSource) -> "PadPool":
        facts = self._facts[index]
        kept = facts.outputs(direction) + source.keeps_masks * facts.inputs(direction)
        pool = PadPool(
            source,
            index=index,
            direction=direction,
            refill=self.refill,
            memory=self._memory,
            row_bytes=wire.RING32.size(1, kept) * max(1, self._routes.helpers_per_pad),
            max_rows=partial(most_rows, self._routes, facts.widest),
        )
        return self._pools.setdefault((index, direction), pool)  # another thread may have made one

    def _holders(self, index: GroupIndex, executor: Peer | None) -> list[HelperClient]:
        """Return the helpers of the next pad; see `scheme.Materials`."""
        provider = next((provider for provider in self._routes.executors if provider.peer == executor), None)
        routes = self._routes.holders(index, provider)
        if len(routes) < max(1, self._routes.helpers_per_pad):
            raise QuarantinedError(
                f"a pad is shared by {self._routes.helpers_per_pad} helpers of companies other than the executor's; "
                f"for {self._facts[index].entry.name} only {len(routes)} are left; nothing is sent. Add helpers."
            )
        return [self._helpers[provider] for provider in routes]


def most_rows(routes: Routes, widest: int) -> int:
    """Return the largest row limit of one request among the executors. A provider with lower limits gets several
    requests, so its limits do not affect requests to other providers."""
    limits = [row_limit(widest, provider.welcome) for provider in routes.executors if provider.welcome is not None]
    return max(limits, default=1)


class PoolMemory:
    """A memory budget in bytes, shared by the pools of a session."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self._lock = limit, 0, threading.Lock()

    def take(self, size: int) -> bool:
        """Reserve memory, or release it if `size` is negative. Returns False if less than `size` bytes are free."""
        with self._lock:
            fits = self.used + size <= self.limit
            self.used += size if fits else 0
            return fits


class PadPool:
    """Pads of one (layer group, direction), drawn ahead. Thread-safe: no lock is held while a pad is drawn.
    `row_bytes`: of the effects of one row, and of its mask if that is kept. `max_rows`: returns the largest number of
    rows of one draw, which depends on the providers in use."""

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
        self._block_rows = _BLOCK_BYTES // row_bytes
        self._ready: deque[Pad] = deque()
        self._ahead = 0
        self._lock = threading.Lock()
        self.taken = 0

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
        if missing:
            pads.append(self._source.draw(PadOrder(self._index, self._direction, missing)))
        return pads

    def take_ready(self, rows: int, most: int) -> Sequence[Pad] | None:
        """Return a pad for a multiple of `rows` rows, at most `most`, if the effects of the next pad have arrived and
        answers are opened by subtracting them; otherwise None. The caller counts the rows as taken."""
        with self._lock:
            pad = self._ready[0] if self._ready else None
            wanted = 0 if pad is None else min(pad.rows, most) // rows * rows
            if not wanted or type(pad) is not Pad or any(share.effect.kept is None for share in pad.shares):
                return None
            del self._ready[0]
            if pad.rows > wanted:
                pad, rest = pad.split(wanted)
                self._ready.appendleft(rest)
            self._release(wanted)
        return [pad]

    def order(self, rows: int) -> None:
        """Draw pads in the background until `rows` rows are ready or being drawn, or until the memory budget is used
        up. For products of few rows, the pool draws many rows at a time, and draws again when half of them are left."""
        several = min(_PRODUCTS * rows, _MOST_ROWS) if rows <= MOST_FEW else 0
        few = min(max(several, _LEAST_ROWS), self._block_rows)
        block, rows = max(rows, few), max(rows, few // 2)
        if self._ahead >= rows:
            return
        block = min(block, self._max_rows())
        while True:
            with self._lock:
                if self._ahead >= rows or not self._memory.take(block * self._row_bytes):
                    return
                self._ahead += block
            self._refill.submit(self._draw_ahead, block)

    def ready(self) -> int:
        """Return the number of pad rows whose effects have arrived."""
        with self._lock:
            return sum(pad.rows for pad in self._ready if all(share.effect.done() for share in pad.shares))

    def _draw_ahead(self, rows: int) -> None:
        try:
            pad = self._source.draw(PadOrder(self._index, self._direction, rows, ahead=True))
        except SymbiosisError as error:
            log.warning("drawing pads ahead failed, the next step draws its own: %s", error)
            with self._lock:
                self._release(rows)
            return
        with self._lock:
            self._ready.append(pad)

    def _release(self, rows: int) -> None:
        self._ahead -= rows
        self._memory.take(-rows * self._row_bytes)


def is_lost(pad: Pad) -> bool:
    """Returns True if an effect of the pad will never arrive, because its helper was lost, refused, or is quarantined.
    A malformed effect does not count as lost, so that the fault is found when the pad is used."""
    for share in pad.shares:
        if share.effect.kept is not None:
            continue
        try:
            if isinstance(share.effect.exception(timeout=0), _GONE):
                return True
        except TimeoutError:  # the effect is still being computed
            continue
    return False
