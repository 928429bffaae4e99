"""The counters of a session, how long the steps of its products take, and one row for the tenant's own eyes.

Inside a `recorded` block, the steps of products are measured. Outside, that costs next to nothing.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, get_args

from torch import Tensor

from tenant.core.masked import MaskedRows
from tenant.routing.known_provider import ProviderFigures


@dataclass
class Ledger:
    """Counters of a session. None of them is secret. `pads_redrawn`: rows whose pads were replaced, because a helper
    was lost, late or at fault. `rows_corrected`: rows whose products left a narrow ring; `rows_repeated`: those that
    left it too often, and were multiplied again at half their scale. `takeovers`: requests that one executor failed to
    answer and another answered; `takeover_s`: their total delay in seconds."""

    rows: int = 0
    products: int = 0
    answers_verified: int = 0
    answers_rejected: int = 0
    effects_verified: int = 0
    pads_taken: int = 0
    pads_redrawn: int = 0
    pads_ready: int = 0
    executor_round_trips: int = 0
    helper_round_trips: int = 0
    bytes_to_executors: int = 0
    bytes_from_executors: int = 0
    bytes_to_helpers: int = 0
    bytes_from_helpers: int = 0
    rows_corrected: int = 0
    rows_repeated: int = 0
    takeovers: int = 0
    takeover_s: float = 0.0
    providers: tuple[ProviderFigures, ...] = ()


class Tally:
    """Counters that several threads add to: `with tally.lock: tally.counts.rows += 1`."""

    def __init__(self) -> None:
        self.counts, self.lock = Ledger(), threading.Lock()


@dataclass
class Sight:
    """The first row of a product: before its mask, and `seen`: as the tenant and as the executor have it."""

    hidden: Tensor | None = None
    seen: tuple[list[int], list[int]] | None = None


sights: Final[dict[int, Sight]] = {}
"""By thread. Empty unless a row is wanted: while it is, products copy nothing."""


def look() -> None:
    """Keep a row of this thread's next product."""
    sights[threading.get_ident()] = Sight()


def taken_sight() -> tuple[list[int], list[int]] | None:
    """Return the row since `look`, quantised, and what the executor saw of it. None if there was no product."""
    sight = sights.pop(threading.get_ident(), None)
    return None if sight is None else sight.seen


def before_mask(words: Tensor) -> None:
    """Copy a row that is wanted. `words`: int32 `[r, d]`."""
    sight = sights.get(threading.get_ident())
    if sight is not None and sight.hidden is None:
        sight.hidden = words[0].clone()


def after_answer(sent: MaskedRows, *, ring_bits: int) -> None:
    """Keep what the executor saw of a row that is wanted."""
    sight = sights.get(threading.get_ident())
    if sight is not None and sight.hidden is not None and sight.seen is None:
        sight.seen = sight.hidden.tolist(), sent.first(ring_bits=ring_bits)


Span = Literal["quantise", "take pads", "mask", "network + product", "wait for effects", "unmask + verify + dequantise"]
SPANS: Final[tuple[Span, ...]] = get_args(Span)

clock = time.perf_counter
_adding = threading.Lock()
recording: dict[Span, float] | None = None


@contextmanager
def recorded() -> Iterator[dict[Span, float]]:
    """Context manager: collect seconds per step for all sessions of this process. Repeated steps add up."""
    global recording
    before, recording = recording, {}
    try:
        yield recording
    finally:
        recording = before


def record(span: Span, *, since: float, until: float | None = None) -> None:
    """Record a step that began at `since`, by `clock`, and ended at `until` or now."""
    if (seconds := recording) is not None:
        spent = (clock() if until is None else until) - since
        with _adding:
            seconds[span] = seconds.get(span, 0.0) + spent
