"""How long the parts of a product take, as a session itself tells it. Off unless somebody records: next to free.

    with recorded() as seconds:
        session.multiply(...)
    seconds["network + product"]

For benchmarks: durations say nothing that the network would not, but they are kept from logs all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Literal, get_args

Part = Literal["quantise", "take pads", "mask", "network + product", "wait for effects", "unmask + verify + dequantise"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)

_OFF: Final = nullcontext()
_adding = threading.Lock()
_record: dict[Part, float] | None = None


def span(part: Part) -> AbstractContextManager[None]:
    """Around a part of the work."""
    return _OFF if _record is None else _timed(_record, part)


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


@contextmanager
def _timed(record: dict[Part, float], part: Part) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        spent = time.perf_counter() - start
        with _adding:
            record[part] = record.get(part, 0.0) + spent
