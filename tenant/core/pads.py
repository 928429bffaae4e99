"""Masks and their effects: what makes a row unreadable, and what takes it off again.

Theory of operation. For a row xq the tenant needs a pad (n, e) with n uniform over the ring and `e = n @ W.T`: it sends
`xq + n`, receives `(xq + n) @ W.T`, and subtracts e. Schemes differ only in where e comes from: `EffectSource`
(`tenant/masking/`).

A `NoisePool` per (layer group, direction) draws pads ahead in the background while memory lasts: for the next product
while the answer to this one is under way. A dry pool draws on the spot: the mask is made at once, and the effect is
fetched while the executor is already working. Either way a row index is burnt first, and a pad is handed out once.

Effects are used as they come. A wrong one makes a wrong product, which the check of the product finds (`verifier`).
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import Keystream, SessionSecret, mask_key
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.errors import CertificateError, ProviderError, QuarantinedError, SymbiosisError, TransportError
from symbiosis_priv.federation import Peer
from tenant.core.facts import GroupFacts
from tenant.routing.route import Route
from tenant.worker import Promise, Worker

log = logging.getLogger(__name__)

_MIN_BLOCK_ROWS, _MIN_BLOCK_BYTES = 64, 1 << 20
# An effect that has met one of these will never come.
_GONE = (TransportError, ProviderError, CertificateError, QuarantinedError)


class Share(NamedTuple):
    """What one seed gives to pads that were drawn together: rows of its keystream, and the promise of their effect.

    Args:
        holder: who else knows the seed and computes the effect; None if it is the tenant itself.
        keystream: of this seed, layer group and direction.
        first_row: of the keystream.
        effect: int32 `[r, o]`, unverified.
    """

    holder: Peer | None
    keystream: Keystream
    first_row: int
    effect: Promise[Tensor]


class Pad(NamedTuple):
    """Mask rows, which nobody has seen before, and the promises of their effects. Used once.

    The mask is the sum of the shares' keystreams, made where it is added: a pad takes no memory but its effects'.

    Args:
        rows: how many of each share's rows.
        shares: what the pad is made of.
        start: where its rows begin in each share.
    """

    rows: int
    shares: tuple[Share, ...]
    start: int = 0

    def put_on(self, rows: Tensor) -> None:
        """Add the mask to int32 rows `[r, d]`, in place."""
        for share in self.shares:
            share.keystream.add_to(rows, first_row=share.first_row + self.start)

    def make_next(self) -> None:
        """Make the masks that come after these, which are likely to be the next ones to be put on."""
        for share in self.shares:
            share.keystream.make_ahead(share.first_row + self.start + self.rows, self.rows)

    def take_off(self, rows: Tensor) -> None:
        """Subtract it again, in place."""
        rows.neg_()
        self.put_on(rows)
        rows.neg_()

    def effects(self) -> list[Tensor]:
        """Every share's effect, int32 `[r, o]` each. Raises what became of a broken promise."""
        return [some_rows(share.effect.result(), self.start, self.rows) for share in self.shares]

    def holders(self) -> list[Peer]:
        """Who else computes its effects."""
        return [share.holder for share in self.shares if share.holder is not None]

    def split(self, rows: int) -> tuple[Pad, Pad]:
        """Two pads over disjoint rows."""
        return Pad(rows, self.shares, self.start), Pad(self.rows - rows, self.shares, self.start + rows)


class EffectSource(ABC):
    """Where pads come from. One instance serves every layer group of a session.

    `workers` are the threads behind its promises: whoever made the source stops and joins them.
    """

    workers: Sequence[Worker] = ()

    def __init__(self, facts: Sequence[GroupFacts], secret: SessionSecret) -> None:
        self._facts = facts
        self._secret = secret
        self._keystreams: dict[tuple[bytes, int, Direction], Keystream] = {}

    @abstractmethod
    def draw(self, index: int, direction: Direction, rows: int, *, ahead: bool, executor: Route | None = None) -> Pad:
        """Burn `rows` fresh row indices and start making their pad.

        Args:
            ahead: made for a pool; must not delay pads that somebody is waiting for.
            executor: who is to see rows under it; by default whoever serves the group.
        """

    def _burn(self, index: int, direction: Direction, rows: int) -> int:
        """Take rows, and return the first."""
        return self._secret.burn(group_name=self._facts[index].entry.name, direction=direction, rows=rows)

    def _keystream(self, seed: bytes, index: int, direction: Direction) -> Keystream:
        """What a seed expands to for one layer group and direction."""
        if (keystream := self._keystreams.get((seed, index, direction))) is None:
            facts = self._facts[index]
            key = mask_key(seed, group_name=facts.entry.name, direction=direction)
            keystream = Keystream(key, width=facts.inputs(direction))
            self._keystreams[seed, index, direction] = keystream
        return keystream


@dataclass
class PoolMemory:
    """A budget shared by the pools of a session, in bytes."""

    limit: int
    used: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, size: int) -> bool:
        """Reserve; False if it does not fit."""
        with self.lock:
            if self.used + size > self.limit:
                return False
            self.used += size
            return True

    def give_back(self, size: int) -> None:
        """Release what was reserved."""
        with self.lock:
            self.used -= size


class NoisePool:
    """Pads of one (layer group, direction), drawn ahead. Thread-safe: nobody holds its lock while a pad is drawn.

    Args:
        source: makes the pads.
        refill: runs a refill in the background.
        memory: the shared budget.
        row_bytes: what one pad row takes: its effects.
        max_rows: says how many rows one draw may have, which is another number once other providers are there.
    """

    def __init__(
        self,
        source: EffectSource,
        *,
        index: int,
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
        """Pads for `rows` rows together, each handed out once."""
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
        """Start making pads until those for so many rows are there or under way, or memory is at its end."""
        block = min(max(rows, self._min_block), self._max_rows())
        while self._is_short_of(rows, block):
            self._refill.submit(self._draw_ahead, block)

    def ready(self) -> int:
        """Rows of pads that nobody has to wait for."""
        with self._lock:
            return sum(pad.rows for pad in self._ready if all(share.effect.done() for share in pad.shares))

    def _is_short_of(self, rows: int, block: int) -> bool:
        """Whether a block more is wanted for that; then it is on the books."""
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
        self._memory.give_back(rows * self._row_bytes)


def cut(pads: Sequence[Pad], rows: int) -> tuple[list[Pad], list[Pad]]:
    """Pads for the first `rows` rows, and those for the rest; of no pads, none."""
    head, rest = list[Pad](), deque(pads)
    while rest and rows:
        pad = rest.popleft()
        if pad.rows > rows:
            pad, later = pad.split(rows)
            rest.appendleft(later)
        head.append(pad)
        rows -= pad.rows
    return head, list(rest)


def is_lost(pad: Pad) -> bool:
    """A helper was away, has refused, or is asked no more, so that some of its effect will never come: another pad is
    needed. Lies are kept, so that they surface."""
    for share in pad.shares:
        try:
            if isinstance(share.effect.exception(timeout=0), _GONE):
                return True
        except TimeoutError:  # it is still being made
            continue
    return False


def padded(rows: Tensor, *, bucket: int) -> Tensor:
    """`rows` and as many rows of zeros as bring their number to a multiple of `bucket`; no copy if none are needed."""
    missing = -len(rows) % bucket
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows


def some_rows(matrix: Tensor, first: int, count: int) -> Tensor:
    """`count` rows from `first` on; the matrix itself if it has no others."""
    return matrix if count == matrix.shape[0] else matrix[first : first + count]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of several matrices as one; no copy if there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
