"""How long the parts of a product take, as a session itself tells it. Off unless somebody records: next to free.

    with recorded() as seconds:
        session.multiply(...)
    seconds["network + product"]

For benchmarks: durations say nothing that the network would not, but they are kept from logs all the same. A part is
told by two calls, and by no context manager: those of the standard library took longer than many a part does, and were
part of what was measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, get_args

Part = Literal["quantise", "take pads", "mask", "network + product", "wait for effects", "unmask + verify + dequantise"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)

clock = time.perf_counter
_adding = threading.Lock()
_record: dict[Part, float] | None = None


def took(part: Part, *, since: float) -> None:
    """A part of the work is done.

    Args:
        since: when it began, by `clock`.
    """
    if (record := _record) is not None:
        spent = clock() - since
        with _adding:
            record[part] = record.get(part, 0.0) + spent


@contextmanager
def recorded() -> Iterator[dict[Part, float]]:
    """Seconds per part, of everything that sessions of this process do inside the block; parts that repeat, or overlap
    because a product goes out in pieces, add up."""
    global _record
    before, _record = _record, {}
    try:
        yield _record
    finally:
        _record = before
