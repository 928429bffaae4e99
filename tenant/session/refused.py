"""What is computed after the check has refused rows: in a narrow ring, products of honest providers may leave the ring.
Their rows are corrected with the verification keys (`symbiosis_priv.arithmetic.wraps`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from symbiosis_priv.arithmetic import passes, wraps
from symbiosis_priv.arithmetic.modular import Column, dot
from tenant.core.parts import Part, Rows

_FEW_ROWS = 8  # more rows than this do not leave a ring by chance at two entries
_ENTRIES = 1 << 22  # of the rows that are copied and corrected together


def correct_or_blame(
    part: Part, answer: Tensor, refused: Sequence[int], product_refused: Callable[..., bool]
) -> Sequence[int] | None:
    """Handle rows that failed the check. `answer`: int32 `[r, o]`, the answer that was opened. `refused`: the numbers
    of the rows, at least one. `product_refused`: `failover.Attempts.refused`, for this answer. Returns the rows that
    left a narrow ring too often to be corrected; None if a provider was at fault and the part has to be sent again."""
    # rows of zeros cannot leave a narrow ring
    may_wrap = part.rows.most_wraps > 0 and part.start + max(refused) < part.rows.count
    # an outlier channel may wrap in all rows, but few rows wrap at two entries, and to look for them takes long
    left = correct(part, refused, answer, entries=1) if may_wrap else refused
    suspicious = not may_wrap or len(left) > _FEW_ROWS
    if suspicious and product_refused(may_wrap=may_wrap):
        return None
    left = correct(part, left, answer)
    return None if left and not suspicious and product_refused(may_wrap=may_wrap) else left


def correct(part: Part, rows: Sequence[int], answer: Tensor, *, entries: int = wraps.MOST_ENTRIES) -> Sequence[int]:
    """Correct the wraps of rows that failed the check, and write their results. `answer`: int32 `[r, o]`, the answer
    that was opened. `entries`: wrapped entries to look for in a row; one takes microseconds, two tens of milliseconds.
    Returns the numbers of the rows that cannot be corrected."""
    if not rows:
        return []
    bits, left = part.rows.ring_bits, list[int]()
    corrector = wraps.Corrector(part.plan.column, ring_bits=bits, most=part.rows.most_wraps)
    look, step = _one_entry if entries == 1 else _two_entries, max(1, _ENTRIES // part.outputs)
    for product in part.opened(answer):
        first = product.start - part.start
        numbers = [row for row in rows if first <= row < first + product.answer.shape[0]]
        for start in range(0, len(numbers), step):
            some = numbers[start : start + step]
            places = [number - first for number in some]
            y = passes.unmask(product.answer[places], [effect[places] for effect in product.effects], ring_bits=bits)
            left += look(part, corrector, some, y)
    return left


def _one_entry(part: Part, corrector: wraps.Corrector, numbers: Sequence[int], y: Tensor) -> list[int]:
    found, products = corrector.one_entry(y, part.expected[list(numbers)])
    if not found:
        return list(numbers)
    rows = [numbers[place] for place in found]
    some, second, residues = _second(part, rows)
    if not torch.equal(dot(products, second), residues):  # the search for two entries tries other explanations
        return list(numbers)
    return sorted({*numbers}.difference(rows).union(part.put(rows, some, products)))


def _two_entries(part: Part, corrector: wraps.Corrector, numbers: Sequence[int], y: Tensor) -> list[int]:
    left = []
    for number, residues in zip(numbers, y, strict=True):
        one, second, residue = _second(part, [number])
        t = corrector.corrected(residues, int(part.expected[number]), (second, int(residue)))
        if t is None or part.put([number], one, t[None]):
            left.append(number)
    return left


def _second(part: Part, rows: Sequence[int]) -> tuple[Rows, Column, Tensor]:
    """Encode rows. Returns them, the second column, and the residues of the true products, int64 `[n]`."""
    r, v = part.plan.second()
    some = part.rows.selected([part.start + row for row in rows])
    residues = torch.empty(len(rows), dtype=torch.int64, device="cpu")
    some.encode(torch.empty((len(rows), part.plan.inputs), dtype=torch.int32, device="cpu"), v=v, expected=residues)
    return some, r, residues
