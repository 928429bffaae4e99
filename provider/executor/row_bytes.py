"""Joins and copies rows as bytes, without torch.

Every torch operation releases the GIL, and waiting for the GIL takes longer than copying a few rows.
"""

from collections.abc import Sequence

import numpy as np

_BRIEF_BYTES = 1 << 18  # copying up to this many bytes takes less time than waiting for the GIL


def joined(parts: Sequence[memoryview]) -> memoryview:
    """The concatenation of all parts. Not a copy if only one part is not empty."""
    if len(parts) > 1:
        parts = [part for part in parts if part]
    if len(parts) == 1:
        return parts[0]
    whole, start = empty(sum(map(len, parts))), 0
    for part in parts:
        fill(whole[start : start + len(part)], part)
        start += len(part)
    return whole


def copy_of(part: memoryview) -> memoryview:
    own = empty(len(part))
    fill(own, part)
    return own


def fill(target: memoryview, source: memoryview) -> None:
    """Copy `source` to `target`, which has the same size."""
    if len(source) <= _BRIEF_BYTES:
        target[:] = source
    else:  # numpy releases the GIL during the copy
        np.frombuffer(target, dtype=np.uint8)[:] = np.frombuffer(source, dtype=np.uint8)


def empty(size: int) -> memoryview:
    """Uninitialised bytes (a bytearray would be cleared)."""
    return np.empty(size, dtype=np.uint8).data
