"""One-time pads: they hide rows, and their effects remove the mask from answers.

Theory of operation. For a row xq the tenant draws a pad (n, e): n is uniform over the ring Z_2^32, and `e = n @ W.T`.
The tenant sends `xq + n`, receives `(xq + n) @ W.T` and subtracts e. Because n is uniform and independent of xq, so is
`xq + n`: the executor learns nothing about xq from it. This holds only if each mask is used for one row. Two rows under
the same mask reveal their difference.

So a mask row is used once. `EffectSource` burns its index before anything else happens (rule 3), and a `Pad` masks
once: the second attempt raises `BurntRowError`. Schemes differ in the source of e (`tenant.masking`).

A pad consists of shares, one for each seed: `n = sum n_j` and `e = sum e_j`. A party that lacks at least one seed sees
a uniform n. Effects are used unchecked: a wrong effect makes a wrong product, and the check of the product finds it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

from torch import Tensor

from symbiosis_priv.arithmetic.keystream import Keystream, mask_key
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.facts import GroupFacts
from symbiosis_priv.errors import BurntRowError
from symbiosis_priv.federation import Peer
from tenant.core.secret import SessionSecret
from tenant.worker import Promise, Worker


class Share(NamedTuple):
    """The share of one seed in a pad: rows of its keystream, and the promise of their effect.

    Args:
        holder: the helper that knows the seed and computes the effect; None if the tenant computes it.
        keystream: keystream of this seed, layer group and direction.
        first_row: first row in the keystream.
        effect: int32 `[r, o]`, unverified.
    """

    holder: Peer | None
    keystream: Keystream
    first_row: int
    effect: Promise[Tensor]


class Pad:
    """Mask rows and the promises of their effects. A pad masks rows once.

    The mask is the sum of the shares' keystreams. It is computed while it is added, so a pad takes no memory for it.

    Args:
        rows: number of rows of each share.
        shares: the shares of the pad, at least one.
        start: first row of the pad in each share.

    Raises:
        BurntRowError: no shares; such a pad would hide nothing.
    """

    __slots__ = ("_unused", "rows", "shares", "start")

    def __init__(self, rows: int, shares: tuple[Share, ...], start: int = 0) -> None:
        if not shares:
            raise BurntRowError("a pad without shares hides nothing; nothing was sent")
        self.rows, self.shares, self.start = rows, shares, start
        self._unused = [True]  # popping is atomic, also with threads

    def add_mask(self, rows: Tensor) -> None:
        """Add the mask to int32 rows `[r, d]`, in place.

        Raises:
            BurntRowError: this pad was used before; the rows are unchanged.
        """
        self._use()
        for share in self.shares:
            share.keystream.add_to(rows, first_row=share.first_row + self.start)

    def subtract_mask(self, rows: Tensor) -> None:
        """Subtract the mask, in place. The pad remains used."""
        rows.neg_()
        for share in self.shares:
            share.keystream.add_to(rows, first_row=share.first_row + self.start)
        rows.neg_()

    def open(self, answer: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the matrices from which the check of the product starts.

        A scheme that opens answers in its own way derives from `Pad` and overrides this method: it may add a second
        keystream to the answer, or subtract the effects and round off a small error.

        Args:
            answer: int32 `[r, o]` from the executor, for this pad's rows; not changed.

        Returns:
            int32 `[r, o]`, and the int32 matrices `[r, o]` that must still be subtracted from it.
        """
        return answer, self.effects()

    def effects(self) -> list[Tensor]:
        """Return every share's effect, int32 `[r, o]`. Raises the error of a promise that failed."""
        return [some_rows(share.effect.result(), self.start, self.rows) for share in self.shares]

    def wrong_effects(self, accepts: Callable[[Tensor, Tensor], bool]) -> Iterator[Peer | None]:
        """Yield the holders whose effects are not the product of their mask rows; None stands for the tenant.

        Args:
            accepts: returns True if int32 `[r, o]` is the product of int32 `[r, d]`.
        """
        for share, effect in zip(self.shares, self.effects(), strict=True):
            if not accepts(share.keystream.expand(share.first_row + self.start, self.rows), effect):
                yield share.holder

    def make_next(self) -> None:
        """Expand the masks that follow this pad's masks, because the next product probably needs them."""
        for share in self.shares:
            share.keystream.make_ahead(share.first_row + self.start + self.rows, self.rows)

    def holders(self) -> list[Peer]:
        """The helpers that know a seed of this pad."""
        return [share.holder for share in self.shares if share.holder is not None]

    def split(self, rows: int) -> tuple[Self, Self]:
        """Split into a pad for the first `rows` rows and a pad for the others. They replace this pad."""
        self._use()
        kind = type(self)
        return kind(rows, self.shares, self.start), kind(self.rows - rows, self.shares, self.start + rows)

    def _use(self) -> None:
        try:
            self._unused.pop()
        except IndexError:
            raise BurntRowError("a pad was about to be used twice; nothing was sent under it again") from None


class EffectSource(ABC):
    """Draws pads. One instance serves all layer groups of a session.

    `workers` are the threads that compute effects. The owner of the source stops and joins them.
    """

    workers: Sequence[Worker] = ()

    def __init__(self, facts: Sequence[GroupFacts], secret: SessionSecret) -> None:
        self._facts = facts
        self._secret = secret
        self._keystreams: dict[tuple[bytes, int, Direction, bool], Keystream] = {}

    @abstractmethod
    def draw(
        self,
        index: int,
        direction: Direction,
        rows: int,
        *,
        counts: Counts | None = None,
        ahead: bool,
        executor: Peer | None = None,
    ) -> Pad:
        """Burn `rows` fresh row indices and start to compute the effects of their masks.

        Args:
            counts: rows of every expert of a stack: each mask's effect is a product with its own expert's matrix.
            ahead: True if no product waits for this pad yet. It then does not delay pads that a product waits for.
            executor: the executor that will see rows under the pad; None for any executor that serves the group.
        """

    def _burn(self, index: int, direction: Direction, rows: int, counts: Counts | None = None) -> int:
        """Burn row indices, and return the first one. Rows for experts have counters and keystreams of their own."""
        facts = self._facts[index].for_rows(counts)
        return self._secret.burn(group_name=facts.entry.name, direction=direction, rows=rows)

    def _keystream(self, seed: bytes, index: int, direction: Direction, counts: Counts | None = None) -> Keystream:
        """The keystream of a seed for one layer group and direction, or for rows for its experts."""
        place = seed, index, direction, counts is None
        if (keystream := self._keystreams.get(place)) is None:
            facts = self._facts[index].for_rows(counts)
            key = mask_key(seed, group_name=facts.entry.name, direction=direction)
            keystream = self._keystreams[place] = Keystream(key, width=facts.inputs(direction))
        return keystream


def some_rows(matrix: Tensor, first: int, count: int) -> Tensor:
    """Return `count` rows from `first` on. Returns the matrix itself if these are all of its rows."""
    return matrix if count == matrix.shape[0] else matrix[first : first + count]
