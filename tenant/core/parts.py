"""A part: the rows of one request, masked before they are sent and checked before they are used.

The steps of a part, in this order:

    mask      adds pads to the encoded rows, once; the result is `MaskedRows`, which can be sent
    remask    only after a failure: replaces pads, so the masked rows change
    open      subtracts the effects from the answer and checks it; results of rows that fail are dropped
    put       only in a narrow ring: checks the corrected product of a row that failed, and writes its results
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

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
        count, width, widest: number of rows r, of columns d, and of columns of rows or answer.
        size: bytes of rows and answer.
        sent: the masked rows, after `mask`.
        relayed: True if the executor has subtracted blocks from the latest answer.
        requests: the headers that were sent, by (executor, rows per request). A retry sends identical bytes, including
            the nonce (rule 3).
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
    relayed: bool = field(default=False, init=False)
    requests: dict[tuple[Hashable, int], list[wire.Execute]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.count, self.width = self.encoded.shape
        self.widest = max(self.width, self.outputs)
        self.size = wire.RING32.size(self.count, self.width + self.outputs)

    @property
    def shares(self) -> list[Share]:
        """All shares of the pads."""
        return [share for pad in self.pads for share in pad.shares]

    @property
    def has_effects(self) -> bool:
        """True if every effect has arrived here; False also if that is not known without a lock."""
        return all(share.effect.kept is not None for pad in self.pads for share in pad.shares)

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
        self.requests.clear()
        return sum(pad.rows for pad in fresh.values())

    def open(self, answer: Tensor, *, relayed: bool = False) -> list[int]:
        """Subtract the effects from an answer, check it, and write the results.

        Args:
            answer: int32 `[r, o]`, an executor's answer. Changed only if it is relayed.
            relayed: True if the executor has subtracted blocks from the answer.

        Returns:
            The numbers of the rows that failed the check. Their results must be dropped.
        """
        self.relayed = relayed
        if relayed:
            for first, pad in self.pads_in_place():
                pad.open_relayed(some_rows(answer, first, pad.rows))
        return [row for block in self.opened(answer) for row in self._check(*block)]

    def opened(self, answer: Tensor) -> list[tuple[int, Tensor, Sequence[Tensor]]]:
        """The rows of each pad: the first row, the answer, and the effects to subtract from it."""
        if self.relayed or not self.pads:
            return [(0, answer, ())]
        return [(first, *pad.open(some_rows(answer, first, pad.rows))) for first, pad in self.pads_in_place()]

    def put(self, row: int, one: Rows, product: Tensor) -> bool:
        """Check the product of one row, int32 `[o]`, and write its results if it is right. Returns True if it is."""
        if one.decode(0, product[None], column=self.column, expected=self.expected[row : row + 1]):
            return False
        self.rows.put([self.start + row], one)
        return True

    def pads_in_place(self) -> Iterable[tuple[int, Pad]]:
        """The pads, each with the first row that it covers."""
        return zip(accumulate([pad.rows for pad in self.pads], initial=0), self.pads, strict=False)

    def _check(self, first: int, answer: Tensor, effects: Sequence[Tensor]) -> list[int]:
        count, bits, wrong = answer.shape[0], self.rows.ring_bits, list[int]()
        expected = some_rows(self.expected, first, count)
        real = self.rows.count - self.start - first
        if real < count:  # rows of zeros are checked like other rows, so that no provider can tell them apart
            real = max(real, 0)
            zeros = unmask(answer[real:], [effect[real:] for effect in effects], ring_bits=bits)
            wrong = [first + real + row for row in refused(zeros, self.column, expected[real:])]
            answer, effects, expected = answer[:real], [effect[:real] for effect in effects], expected[:real]
        if real:
            failed = self.rows.decode(
                self.start + first, answer, effects=effects, column=self.column, expected=expected, ring_bits=bits
            )
            wrong = [first + row for row in failed] + wrong
        return wrong
