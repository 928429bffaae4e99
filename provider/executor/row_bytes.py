"""Rows as bytes: joined, copied and made room for, without an operation of torch's.

Each of those lets go of the interpreter's lock, and getting it back from the gateway's threads takes longer than to
copy what is brief.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_BRIEF_BYTES = 1 << 18  # to copy them takes less time than to get the interpreter's lock back


def joined(parts: Sequence[memoryview]) -> memoryview:
    """All of them in one piece of memory: a part's own if only that has anything in it."""
    parts = [part for part in parts if part]
    if len(parts) == 1:
        return parts[0]
    whole, start = empty(sum(map(len, parts))), 0
    for part in parts:
        fill(whole[start : start + len(part)], part)
        start += len(part)
    return whole


def copy_of(part: memoryview) -> memoryview:
    """The same bytes in memory of their own."""
    own = empty(len(part))
    fill(own, part)
    return own


def fill(target: memoryview, source: memoryview) -> None:
    """Copy bytes into as many others."""
    if len(source) <= _BRIEF_BYTES:
        target[:] = source
    else:  # numpy lets others go on meanwhile
        np.frombuffer(target, dtype=np.uint8)[:] = np.frombuffer(source, dtype=np.uint8)


def empty(size: int) -> memoryview:
    """Bytes to be filled: they are not cleared, as a bytearray's would be."""
    return np.empty(size, dtype=np.uint8).data
