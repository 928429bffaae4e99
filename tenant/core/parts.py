"""A part: the rows of one request, masked before they are sent and checked before they are used.

The steps of a part, in this order:

    mask      adds pads to the encoded rows, once; the result is `MaskedRows`, which can be sent
    remask    only after a failure: replaces pads, so the masked rows change
    open      subtracts the effects from the answer and checks it; results of rows that fail are dropped
    correct   only in a narrow ring: corrects the wraps of rows that failed
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from symbiosis_priv.arithmetic import wraps
from symbiosis_priv.arithmetic.modular import Column
from symbiosis_priv.arithmetic.passes import refused, unmask
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts, clip
from symbiosis_priv.network import wire
from tenant.core.masked import MaskedRows, mask, remask
from tenant.core.pads import Pad, Share, some_rows
from tenant.core.rows import Products, Rows


@dataclass(eq=False)
class Part:
    """The rows of one request, under pads that were burnt for them.

    Args:
        index: index of the layer group.
        direction: forward or backward.
        rows: all rows of the product.
        start: index of the part's first row in the product.
        encoded: int32 `[r, d]`, the part's rows in the ring, followed by rows of zeros if the bucket requires more
            rows.
        column: the secret column R.
        expected: int64 `[r]`, R applied to the true product of the rows.
        second: returns another R and its V, which are read only for rows that fail the check in a narrow ring.
        pads: pads for these rows; `UNMASKED_BY_CHOICE` without masking.
        outputs: width of an answer's row.
        counts: rows of every expert, zeros of the bucket included, if rows belong to experts of a stack.

    Attributes:
        count: number of rows r.
        size: bytes of rows and answer.
        sent: the masked rows, after `mask`.
        shares: all shares of the pads.
        requests: the headers that were sent, by (executor, rows per request). A retry sends identical bytes, including
            the
            nonce (rule 3).
    """

    index: int
    direction: Direction
    rows: Rows
    start: int
    encoded: Tensor
    column: Column
    expected: Tensor
    second: Callable[[], tuple[Column, Products]]
    pads: Sequence[Pad]
    outputs: int
    counts: Counts | None = None
    sent: MaskedRows = field(init=False)
    shares: list[Share] = field(init=False)
    requests: dict[tuple[Hashable, int], list[wire.Execute]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.count, width = self.encoded.shape
        self.size = wire.RING32.size(self.count, width + self.outputs)
        self.shares = [share for pad in self.pads for share in pad.shares]

    def mask(self) -> None:
        """Mask the rows. Afterwards the part holds no unmasked rows.

        Raises:
            BurntRowError: a pad was used before, or the pads do not cover the rows.
        """
        self.sent = mask(self.encoded, self.pads)
        del self.encoded

    def counts_of(self, first: int, rows: int) -> Counts | None:
        """The counts of some rows of this part."""
        return None if self.counts is None else clip(self.counts, first, rows)

    def remask(self, spoilt: Callable[[Pad], bool], draw: Callable[[int, Counts | None], Pad]) -> int:
        """Replace pads, and forget the requests that were sent under the old ones.

        Args:
            spoilt: selects the pads to replace.
            draw: draws a fresh pad for a number of rows and their counts.

        Returns:
            The number of rows whose pads were replaced.
        """
        fresh = {
            number: draw(pad.rows, self.counts_of(first, pad.rows))
            for number, (first, pad) in enumerate(self.pads_in_place())
            if spoilt(pad)
        }
        self.sent = remask(self.sent, fresh)
        self.pads = self.sent.pads
        self.shares = [share for pad in self.pads for share in pad.shares]
        self.requests.clear()
        return sum(pad.rows for pad in fresh.values())

    def open(self, answer: Tensor) -> list[int]:
        """Subtract the effects from an answer, check it, and write the results.

        Args:
            answer: int32 `[r, o]`, an executor's answer; not changed.

        Returns:
            The numbers of the rows that failed the check. Their results must be dropped.
        """
        return [row for block in self._blocks(answer) for row in self._check(*block)]

    def may_wrap(self, rows: Sequence[int]) -> bool:
        """Returns True if the products of all these rows can leave a narrow ring. Rows of zeros cannot."""
        return self.rows.most_wraps > 0 and self.start + max(rows) < self.rows.count

    def correct(self, rows: Sequence[int], answer: Tensor) -> list[int]:
        """Correct the wraps of rows that failed the check, and write their results.

        Returns:
            The numbers of the rows that cannot be corrected.
        """
        left = []
        for first, block, effects in self._blocks(answer):
            for row in (row - first for row in rows if first <= row < first + block.shape[0]):
                y = unmask(block[row], [effect[row] for effect in effects], ring_bits=self.rows.ring_bits)
                if not self._correct(first + row, y):
                    left.append(first + row)
        return left

    def multiply_again(self, rows: Sequence[int], multiply: Callable[[Rows], None]) -> None:
        """Multiply rows of this part at half their scale (`Rows.multiply_again`)."""
        self.rows.multiply_again([self.start + row for row in rows], multiply)

    def pads_in_place(self) -> Iterator[tuple[int, Pad]]:
        """The pads, each with the first row that it covers."""
        first = 0
        for pad in self.pads:
            yield first, pad
            first += pad.rows

    def _blocks(self, answer: Tensor) -> Iterator[tuple[int, Tensor, Sequence[Tensor]]]:
        """The rows of each pad: the first row, the answer, and the effects to subtract from it."""
        if not self.pads:
            yield 0, answer, ()
        for first, pad in self.pads_in_place():
            yield first, *pad.open(some_rows(answer, first, pad.rows))

    def _check(self, first: int, answer: Tensor, effects: Sequence[Tensor]) -> list[int]:
        count = answer.shape[0]
        real = min(max(self.rows.count - self.start - first, 0), count)
        bits, wrong = self.rows.ring_bits, list[int]()
        if real:
            wrong += self.rows.decode(
                self.start + first,
                some_rows(answer, 0, real),
                effects=[some_rows(effect, 0, real) for effect in effects],
                column=self.column,
                expected=some_rows(self.expected, first, real),
                ring_bits=bits,
            )
        if real < count:  # rows of zeros are checked like other rows, so that no provider can tell them apart
            zeros = unmask(answer[real:], [effect[real:] for effect in effects], ring_bits=bits)
            expected = self.expected[first + real : first + count]
            wrong += [real + row for row in refused(zeros, self.column, expected)]
        return [first + row for row in wrong]

    def _correct(self, row: int, y: Tensor) -> bool:
        """Correct the wraps of one row. Returns True if its results were written.

        Args:
            y: int32 `[o]`, the signed residues of its product.
        """
        one = self.rows.some([number := self.start + row])
        column, products = self.second()
        residue = torch.empty(1, dtype=torch.int64, device="cpu")
        one.encode(
            self.sent.masked_words.new_empty((1, self.sent.masked_words.shape[1])), column=products, expected=residue
        )
        expected = self.expected[row : row + 1]
        t = wraps.corrected(
            y,
            (self.column, int(expected)),
            (column, int(residue)),
            ring_bits=self.rows.ring_bits,
            most=self.rows.most_wraps,
        )
        if t is None or one.decode(0, t[None], column=self.column, expected=expected):
            return False
        self.rows.put([number], one)
        return True
