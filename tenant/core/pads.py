"""The secret of a session and its one-time pads, which hide rows, and whose effects remove the mask from answers.

Theory of operation. For a row xq the tenant draws a pad (n, e): n is uniform over the ring Z_2^32, and `e = n @ W.T`.
The tenant sends `xq + n`, receives `(xq + n) @ W.T` and subtracts e. Because n is uniform and independent of xq, so is
`xq + n`: the executor learns nothing about xq from it. Two rows under the same mask would reveal their difference, so a
mask row is used once. `SessionSecret` counts mask rows (rules 2, 3 and 12), `EffectSource` burns a row's index
before anything else happens (rule 3), and a `Pad` masks once: the second attempt raises `BurntRowError`. Schemes differ
in the source of e (`tenant.masking`).

A pad consists of shares, one for each seed: `n = sum n_j` and `e = sum e_j`. A party that lacks at least one seed sees
a uniform n. Effects are used unchecked: a wrong effect makes a wrong product, and the check of the product finds it.
A scheme whose effects are not exactly those of its masks says what the check has to expect (`Pad.correction`).

Forks. Secrets, pads and connections belong to the process that made them (rule 12). Python's fork hook runs in every
child of `os.fork`, also in a new pid namespace, where the child may have its parent's process id. C code that calls
libc's `fork` runs no hook, but the child has another process id, which `generation` compares. A fork by C code into a
new pid namespace can escape both, and a copy of the machine (a snapshot, CRIU) does.
"""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, Self

from torch import Tensor

from symbiosis_priv.arithmetic.keystream import SEED_BYTES, Keystream, Seed, derive, mask_key
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.errors import BurntRowError
from symbiosis_priv.federation import Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.system.locked import LockedSecret

if TYPE_CHECKING:
    from tenant.worker import Promise, Worker

_forks = 0
_pid = os.getpid()
_in_child: list[Callable[[], None]] = []


def generation() -> int:
    """Number of forks between this process and the one that first imported this module: an object of another generation
    was copied by a fork. Compare it before every use of a secret, because only this detects a fork by C code."""
    if os.getpid() != _pid:
        _forked()
    return _forks


def call_in_child(function: Callable[[], None]) -> None:
    """Register a function that every forked child calls as soon as it notices the fork."""
    _in_child.append(function)


def _forked() -> None:
    global _forks, _pid
    _pid = os.getpid()
    _forks += 1
    for function in _in_child:
        function()


os.register_at_fork(after_in_child=_forked)


class SessionSecret:
    """A fresh 256-bit secret, in memory that is not swapped, and its row counters. They are never stored or copied. In
    a forked child every method raises `BurntRowError`, because parent and child would use the same rows (rule 2). The
    child opens its own session."""

    def __init__(self) -> None:
        self._secret = LockedSecret(secrets.token_bytes(SEED_BYTES))
        self._generation = generation()
        self._lock = Lock()
        self._next_row: defaultdict[tuple[str, str], int] = defaultdict(int)

    def seed_for(self, *holder: str) -> Seed:
        """Return the 32-byte seed for one holder, for a helper its name and its key's fingerprint (rule 11)."""
        self._check_alive()
        return Seed(derive(bytes(self._secret), "helper", *holder))

    def burn(self, *, group_name: str, direction: str, rows: int) -> int:
        """Burn `rows` fresh row indices of a (group, direction). Returns the first. No index is returned twice."""
        self._check_alive()
        if rows < 0:
            raise BurntRowError(f"a counter never goes back: cannot burn {rows} rows")
        with self._lock:
            first = self._next_row[group_name, direction]
            self._next_row[group_name, direction] = first + rows
        return first

    @property
    def alive(self) -> bool:
        """False in a forked child."""
        return generation() == self._generation

    def _check_alive(self) -> None:
        if not self.alive:
            raise BurntRowError("this process was forked from the one that drew the session secret; open a new session")

    def __reduce__(self) -> NoReturn:
        raise BurntRowError("a session secret and its counters are never stored or copied; open a new session")

    def __repr__(self) -> str:
        return "SessionSecret(...)"


class MaskStream(Protocol):
    """Rows of masks by their number: a `Keystream`, or what a scheme makes of keystreams."""

    def add_to(self, matrix: Tensor, *, first_row: int) -> None:
        """Add rows from `first_row` on to a matrix, int32 `[rows, d]`, modulo 2^32 and in place."""

    def expand(self, first_row: int, rows: int) -> Tensor:
        """Return rows, int32 `[rows, d]`: those that `add_to` adds."""

    def make_ahead(self, first_row: int, rows: int) -> None:
        """Make a few rows ahead of time, if that saves time."""


class Share(NamedTuple):
    """The share of one seed in a pad: rows of its keystream, and the promise of their effect."""

    holder: Peer | None  # the helper that knows the seed and computes the effect; None if the tenant computes it
    keystream: MaskStream
    first_row: int  # of the pad in the keystream
    effect: Promise[Tensor]  # int32 `[r, o]`, unverified
    offset: int = 0  # of the pad in the effect

    def without_first(self, rows: int) -> Self:
        """Return the share without its first `rows` rows."""
        return type(self)(self.holder, self.keystream, self.first_row + rows, self.effect, self.offset + rows)


class Pad:
    """Mask rows and the promises of their effects. A pad masks rows once. The mask is the sum of the shares'
    keystreams, computed while it is added. `rows`: number of rows of each share. `shares`: at least one; otherwise
    raises `BurntRowError`, because such a pad would hide nothing."""

    __slots__ = ("_unused", "rows", "shares")

    def __init__(self, rows: int, shares: tuple[Share, ...]) -> None:
        if not shares:
            raise BurntRowError("a pad without shares hides nothing; nothing was sent")
        self.rows, self.shares = rows, shares
        self._unused = [True]  # popping is atomic, also with threads

    def add_mask(self, rows: Tensor, *, added: bool = False) -> None:
        """Add the mask to int32 rows `[r, d]`, in place, unless it was `added` to rows that nobody has got yet. Raises
        `BurntRowError`: this pad was used before; the rows are unchanged."""
        self._use()
        if not added:
            for share in self.shares:
                share.keystream.add_to(rows, first_row=share.first_row)

    def subtract_mask(self, rows: Tensor) -> None:
        """Subtract the mask, in place. The pad remains used."""
        rows.neg_()
        for share in self.shares:
            share.keystream.add_to(rows, first_row=share.first_row)
        rows.neg_()

    def open(self, answer: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the matrices from which the check of the product starts; a scheme may override it. `answer`: int32
        `[r, o]` from the executor, for this pad's rows; not changed. Returns int32 `[r, o]`, and the int32 matrices
        `[r, o]` that must still be subtracted from it."""
        return answer, self.effects()

    def correction(self) -> Tensor | None:
        """Return R applied to what the pad itself adds to the products of the rows, int64 `[r]` modulo p; None if it
        adds nothing. A scheme may override it."""
        return None

    def wrong_effects(self, is_product: Callable[[Tensor, Tensor], bool]) -> list[Peer | None]:
        """Return the holders of wrong effects, after the check has refused a product; None for the tenant itself.
        `is_product`: tests by the blame keys whether effects, int32 `[r, o]`, are the products of rows, int32 `[r, d]`.
        """
        effects = zip(self.shares, self.effects(), strict=True)
        return [s.holder for s, e in effects if not is_product(s.keystream.expand(s.first_row, self.rows), e)]

    def effects(self) -> list[Tensor]:
        """Return every share's effect, int32 `[r, o]`. Raises the error of a promise that failed."""
        rows = self.rows
        effects = []
        for share in self.shares:
            effect = share.effect.result() if share.effect.kept is None else share.effect.kept
            effects.append(effect[share.offset : share.offset + rows])
        return effects

    def split(self, rows: int) -> tuple[Self, Self]:
        """Split into a pad for the first `rows` rows and a pad for the others. They replace this pad."""
        self._use()
        kind = type(self)
        others = tuple([share.without_first(rows) for share in self.shares])
        return kind(rows, self.shares), kind(self.rows - rows, others)

    def cut(self, rows: int) -> list[Self]:
        """Split into pads of `rows` rows each, of which this pad has a multiple. They replace this pad."""
        self._use()
        return [type(self)(rows, tuple([s.without_first(n) for s in self.shares])) for n in range(0, self.rows, rows)]

    def _use(self) -> None:
        try:
            self._unused.pop()
        except IndexError:
            raise BurntRowError("a pad was about to be used twice; nothing was sent under it again") from None


@dataclass(frozen=True)
class PadOrder:
    """The order of a pad."""

    index: GroupIndex
    direction: Direction
    rows: int
    counts: Counts | None = None  # of every expert of a stack: each effect is a product with its own expert's matrix
    ahead: bool = False  # no product waits for this pad yet, so it does not delay others
    executor: Peer | None = None  # that will see rows under the pad; None for any executor that serves the group


class EffectSource(ABC):
    """Draws pads for all layer groups of a session. The session stops the `workers`, which compute effects.
    `keeps_masks` is True if pads that are drawn ahead take memory for their masks, too."""

    workers: Sequence[Worker] = ()
    keeps_masks = False

    def __init__(self, facts: Sequence[GroupFacts], secret: SessionSecret) -> None:
        self._facts = facts
        self._secret = secret
        self._keystreams: dict[tuple[Seed, GroupIndex, Direction, bool], Keystream] = {}

    @abstractmethod
    def draw(self, order: PadOrder) -> Pad:
        """Burn fresh row indices and start to compute the effects of their masks."""

    def _burn(self, order: PadOrder) -> int:
        """Burn row indices, and return the first one. Rows for experts have counters and keystreams of their own."""
        facts = self._facts[order.index].for_rows(order.counts)
        return self._secret.burn(group_name=facts.entry.name, direction=order.direction, rows=order.rows)

    def _keystream(
        self, seed: Seed, index: GroupIndex, direction: Direction, counts: Counts | None = None
    ) -> Keystream:
        """Return the keystream of a seed for one layer group and direction, or for rows for its experts."""
        place = seed, index, direction, counts is None
        if (keystream := self._keystreams.get(place)) is None:
            facts = self._facts[index].for_rows(counts)
            key = mask_key(seed, group_name=facts.entry.name, direction=direction)
            keystream = self._keystreams[place] = Keystream(key, width=facts.inputs(direction))
        return keystream


def with_first_rows(pads: Sequence[Pad]) -> Iterable[tuple[int, Pad]]:
    """Yield the pads of consecutive rows, each with the first row that it covers."""
    return zip(accumulate([pad.rows for pad in pads], initial=0), pads, strict=False)


def row_range(matrix: Tensor, first: int, count: int) -> Tensor:
    """Return `count` rows from `first` on. Returns the matrix itself if these are all of its rows."""
    return matrix if count == matrix.shape[0] else matrix[first : first + count]
