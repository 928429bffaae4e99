"""A part: the rows of one request, masked before they are sent and checked before they are used.

The steps of a part, in this order:

    mask      adds pads to the encoded rows, once; the result is `MaskedRows`, which can be sent
    remask    only after a failure: replaces pads, so the masked rows change
    open      subtracts the effects from the answer and checks it; results are written only if the check passes
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from symbiosis_priv.arithmetic.modular import Column
from symbiosis_priv.arithmetic.passes import unmask
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts, clip
from symbiosis_priv.network import wire
from tenant.core.masked import MaskedRows, mask, remask
from tenant.core.pads import Pad, Share, some_rows
from tenant.core.rows import Rows


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

    def open(self, answer: Tensor) -> bool:
        """Subtract the effects from an answer, check it, and write the results.

        Args:
            answer: int32 `[r, o]`, an executor's answer; not changed.

        Returns:
            True if every row passed the check. Otherwise the results of all rows must be dropped.
        """
        if not self.pads:
            return self._check(0, answer, ())
        return all(
            self._check(first, *pad.open(some_rows(answer, first, pad.rows))) for first, pad in self.pads_in_place()
        )

    def pads_in_place(self) -> Iterator[tuple[int, Pad]]:
        """The pads, each with the first row that it covers."""
        first = 0
        for pad in self.pads:
            yield first, pad
            first += pad.rows

    def _check(self, first: int, answer: Tensor, effects: Sequence[Tensor]) -> bool:
        count = answer.shape[0]
        real = min(max(self.rows.count - self.start - first, 0), count)
        if real < count:  # rows of zeros are checked like other rows, so that no provider can tell them apart
            filled = slice(first + real, first + count)
            zeros = unmask(
                answer[real:],
                effects=[effect[real:] for effect in effects],
                column=self.column,
                expected=self.expected[filled],
            )
            if zeros is None or not real:
                return zeros is not None
            effects = [effect[:real] for effect in effects]
        return self.rows.decode(
            self.start + first,
            some_rows(answer, 0, real),
            effects=effects,
            column=self.column,
            expected=some_rows(self.expected, first, real),
        )
