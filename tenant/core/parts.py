"""A part: the rows of one request, masked before they are sent and checked before they are used.

The steps of a part, in this order:

    mask      adds pads to the encoded rows, once; the result is `MaskedRows`, which can be sent
    remask    only after a failure: replaces pads, so the masked rows change
    open      subtracts the effects from the answer and checks it; results of rows that fail are dropped
    put       only in a narrow ring: checks the corrected products of rows that failed, and writes their results
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from symbiosis_priv.arithmetic.modular import Column
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts, clip
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.core.masked import MaskedRows, mask, remask
from tenant.core.pads import Pad, row_range, with_first_rows
from tenant.core.rows import Rows, UncheckedProduct
from tenant.core.verifier import V


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
        count, width: r and d. widest: the larger of d and `outputs`.
        size: bytes of rows and answer, 4 bytes per integer.
        sent: the masked rows, after `mask`.
        relayed: True if the executor has subtracted blocks from the latest answer.
        requests: the headers that were sent, by (executor, rows per request). A retry sends identical bytes, including
            the nonce (rule 3).
    """

    index: GroupIndex
    direction: Direction
    rows: Rows
    start: int
    encoded: Tensor
    column: Column
    expected: Tensor
    second: Callable[[], tuple[Column, V]]
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

    def mask(self) -> None:
        """Mask the rows (`masked.mask`). Afterwards the part holds no unmasked rows."""
        self.sent = mask(self.encoded, self.pads)
        del self.encoded

    def counts_of(self, first: int, rows: int) -> Counts | None:
        """Return the counts of some rows of this part."""
        return None if self.counts is None else clip(self.counts, first, rows)

    def remask(self, fresh: Mapping[int, Pad]) -> None:
        """Replace pads, by their index (`masked.remask`), and forget the requests that were sent under the old ones."""
        self.sent = remask(self.sent, fresh)
        self.pads = self.sent.pads
        self.requests.clear()

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
            for first, pad in with_first_rows(self.pads):
                pad.open_relayed(row_range(answer, first, pad.rows))
        refused = list[int]()
        for product in self.opened(answer):
            first = product.start - self.start
            refused += [first + row for row in self._check(product)]
        return refused

    def opened(self, answer: Tensor) -> list[UncheckedProduct]:
        """Return the unchecked product of each pad's rows."""
        if self.relayed or not self.pads:
            return [self._unchecked(0, answer, ())]
        placed = with_first_rows(self.pads)
        return [self._unchecked(first, *pad.open(row_range(answer, first, pad.rows))) for first, pad in placed]

    def put(self, rows: Sequence[int], some: Rows, products: Tensor) -> list[int]:
        """Check products of rows, int32 `[n, o]`, and write the results of those that pass. Returns the others."""
        product = UncheckedProduct(0, products, column=self.column, expected=self.expected[list(rows)])
        wrong = set(some.decode(product))
        right = [place for place in range(len(rows)) if place not in wrong]
        self.rows.put([self.start + rows[place] for place in right], some, right)
        return [rows[place] for place in sorted(wrong)]

    def _unchecked(self, first: int, answer: Tensor, effects: Sequence[Tensor]) -> UncheckedProduct:
        expected = row_range(self.expected, first, answer.shape[0])
        return UncheckedProduct(self.start + first, answer, effects, self.column, expected, self.rows.ring_bits)

    def _check(self, product: UncheckedProduct) -> list[int]:
        count = product.answer.shape[0]
        real = min(max(0, self.rows.count - product.start), count)
        if real == count:
            return self.rows.decode(product)
        # rows of zeros are checked like other rows, so that no provider can tell them apart
        wrong = self.rows.decode(product.rows(slice(0, real))) if real else []
        _, zeros = product.rows(slice(real, count)).unmasked()
        return wrong + [real + row for row in zeros]
