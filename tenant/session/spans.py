"""Measures how long the steps of a product take. Outside a `recorded` block the cost is negligible.

    with recorded() as seconds:
        session.multiply(...)
    seconds["network + product"]

For benchmarks. Durations reveal nothing that the network does not show, but are not logged. A step is recorded with two
calls instead of a context manager, because a context manager takes longer than many steps.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, get_args

Span = Literal["quantise", "take pads", "mask", "network + product", "wait for effects", "unmask + verify + dequantise"]
SPANS: Final[tuple[Span, ...]] = get_args(Span)

clock = time.perf_counter
_adding = threading.Lock()
_record: dict[Span, float] | None = None


def record(span: Span, *, since: float) -> None:
    """Record the end of a step.

    Args:
        since: when the step began, by `clock`.
    """
    if (seconds := _record) is not None:
        spent = clock() - since
        with _adding:
            seconds[span] = seconds.get(span, 0.0) + spent


@contextmanager
def recorded() -> Iterator[dict[Span, float]]:
    """Collect seconds per step for all sessions of this process inside the block. Repeated steps add up."""
    global _record
    before, _record = _record, {}
    try:
        yield _record
    finally:
        _record = before
