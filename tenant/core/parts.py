"""Some rows of a product, as many as one request may have, under pads that were burnt for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from symbiosis_priv.arithmetic.modular import Column
from symbiosis_priv.arithmetic.passes import unmask
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.network import wire
from tenant.core.pads import Pad, some_rows
from tenant.core.rows import Rows

_MOST_PIECES = 4  # of a product, per executor: many small ones cost more than they hide


@dataclass
class Part:
    """See the module's text.

    Args:
        index: of the layer group.
        direction: forward or backward.
        rows: all rows of the product.
        start: the first of these.
        sent: int32 `[r, d]`, these rows in the ring, and zeros where the bucket asks for more than there are.
        column: R.
        expected: int64 `[r]`, what R makes of their true product.
        pads: for these rows; none without masking.
        outputs: columns of the answer.

    Attributes:
        size: bytes, rows and answer together.
        shares: all that its pads are made of.
        holders: who else knows a seed of them.
        requests: as they were sent, by (to whom, rows of each): who is asked again gets identical bytes, nonce
            included.
    """

    index: int
    direction: Direction
    rows: Rows
    start: int
    sent: Tensor
    column: Column
    expected: Tensor
    pads: Sequence[Pad]
    outputs: int
    requests: dict[tuple[Hashable, int], list[wire.Execute]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        rows, width = self.sent.shape
        self.size = wire.RING32.size(rows, width + self.outputs)
        self._look_at_pads()

    def put_on_pads(self) -> None:
        """Mask the rows. They are what is sent from now on, and they do not change again (rule 3)."""
        for pad, first in self._places:
            pad.put_on(some_rows(self.sent, first, pad.rows))

    def change_pads(self, spoilt: Callable[[Pad], bool], draw: Callable[[int], Pad]) -> int:
        """Take rows off pads and put them on fresh ones: another content from now on, for which nothing of the old
        pads is used again (rule 3).

        Args:
            spoilt: which pads to change.
            draw: a fresh pad for so many rows.

        Returns:
            How many rows have changed.
        """
        changed, pads = 0, list(self.pads)
        for number, (pad, first) in enumerate(self._places):
            if spoilt(pad):
                fresh = draw(pad.rows)
                rows = some_rows(self.sent, first, pad.rows)
                pad.take_off(rows)
                fresh.put_on(rows)
                pads[number] = fresh
                changed += pad.rows
        self.pads = pads
        self._look_at_pads()
        self.requests.clear()
        return changed

    def decode(self, answer: Tensor) -> bool:
        """Take the effects off an answer and hand it on, if it is the product; see `Rows.decode`."""
        if not self.pads:
            return self._decode(answer, 0, self.sent.shape[0], [])
        return all(self._decode(answer, first, pad.rows, pad.effects()) for pad, first in self._places)

    def _look_at_pads(self) -> None:
        """What is asked of the pads several times for every request."""
        self._places: list[tuple[Pad, int]] = []  # one below the other, and the row where each begins
        first = 0
        for pad in self.pads:
            self._places.append((pad, first))
            first += pad.rows
        self.shares = [share for pad in self.pads for share in pad.shares]
        self.holders = tuple(dict.fromkeys([share.holder for share in self.shares if share.holder is not None]))

    def _decode(self, answer: Tensor, first: int, count: int, effects: Sequence[Tensor]) -> bool:
        real = min(max(self.rows.count - self.start - first, 0), count)
        if real < count:  # zeros: checked like rows, so that nobody can tell them apart
            filled = slice(first + real, first + count)
            zeros = unmask(
                answer[filled],
                effects=[effect[real:] for effect in effects],
                column=self.column,
                expected=self.expected[filled],
            )
            if zeros is None or not real:
                return zeros is not None
            effects = [effect[:real] for effect in effects]
        return self.rows.decode(
            self.start + first,
            some_rows(answer, first, real),
            effects=effects,
            column=self.column,
            expected=some_rows(self.expected, first, real),
        )


def piece_rows(count: int, group: GroupEntry, *, piece_bytes: int, executors: int = 1) -> int:
    """Rows of each piece that a product of `count` rows is cut into, by its size alone (rule 5), and by how many
    executors share it."""
    return -(-count // max(1, min(_MOST_PIECES * executors, product_bytes(count, group) // piece_bytes)))


def product_bytes(count: int, group: GroupEntry) -> int:
    """Bytes of a product of so many rows, both ways."""
    return wire.RING32.size(count, group.inputs + group.stacked_outputs)
