"""Corrects rows whose products left a narrow ring (`symbiosis_priv.arithmetic.wraps`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from symbiosis_priv.arithmetic import wraps
from symbiosis_priv.arithmetic.passes import unmask
from tenant.core.parts import Part


def may_wrap(part: Part, rows: Sequence[int]) -> bool:
    """Returns True if the products of all these rows can leave a narrow ring. Rows of zeros cannot."""
    return part.rows.most_wraps > 0 and part.start + max(rows) < part.rows.count


def correct(part: Part, rows: Sequence[int], answer: Tensor) -> list[int]:
    """Correct the wraps of rows that failed the check, and write their results.

    Args:
        answer: int32 `[r, o]`, the answer that was opened.

    Returns:
        The numbers of the rows that cannot be corrected.
    """
    left = []
    for first, block, effects in part.opened(answer):
        for row in (row - first for row in rows if first <= row < first + block.shape[0]):
            y = unmask(block[row], [effect[row] for effect in effects], ring_bits=part.rows.ring_bits)
            if not _correct(part, first + row, y):
                left.append(first + row)
    return left


def _correct(part: Part, row: int, y: Tensor) -> bool:
    """Correct the wraps of one row. Returns True if its results were written.

    Args:
        y: int32 `[o]`, the signed residues of its product.
    """
    one = part.rows.some([part.start + row])
    column, products = part.second()
    residue = torch.empty(1, dtype=torch.int64, device="cpu")
    one.encode(torch.empty((1, part.width), dtype=torch.int32, device="cpu"), column=products, expected=residue)
    t = wraps.corrected(
        y,
        (part.column, int(part.expected[row])),
        (column, int(residue)),
        ring_bits=part.rows.ring_bits,
        most=part.rows.most_wraps,
    )
    return t is not None and part.put(row, one, t)
