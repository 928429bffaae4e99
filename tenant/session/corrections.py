"""Corrects rows whose products left a narrow ring (`symbiosis_priv.arithmetic.wraps`)."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from symbiosis_priv.arithmetic import wraps
from tenant.core.parts import Part
from tenant.core.rows import Rows


def may_wrap(part: Part, rows: Sequence[int]) -> bool:
    """Returns True if the products of all these rows can leave a narrow ring. Rows of zeros cannot."""
    return part.rows.most_wraps > 0 and part.start + max(rows) < part.rows.count


def correct(part: Part, rows: Sequence[int], answer: Tensor, *, entries: int = wraps.MOST_ENTRIES) -> list[int]:
    """Correct the wraps of rows that failed the check, and write their results.

    Args:
        answer: int32 `[r, o]`, the answer that was opened.
        entries: the maximum number of wrapped entries to look for in a row.

    Returns:
        The numbers of the rows that cannot be corrected.
    """
    if not rows:
        return []
    bits, left = part.rows.ring_bits, []
    corrector = wraps.Corrector(part.column, ring_bits=bits, most=part.rows.most_wraps)
    for product in part.opened(answer):
        first = product.start - part.start
        for number in [row for row in rows if first <= row < first + product.answer.shape[0]]:
            y = product.rows(slice(number - first, number - first + 1)).unmasked()[0][0]
            one = part.rows.selected([part.start + number])
            t = corrector.corrected(y, int(part.expected[number]), partial(_second, part, one), entries=entries)
            if t is None or not part.put(number, one, t):
                left.append(number)
    return left


def _second(part: Part, one: Rows) -> wraps.Check:
    """Encode one row, and return the second check of its product."""
    r, v = part.second()
    residue = torch.empty(1, dtype=torch.int64, device="cpu")
    one.encode(torch.empty((1, part.width), dtype=torch.int32, device="cpu"), v=v, expected=residue)
    return r, int(residue)
