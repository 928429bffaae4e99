"""What a session counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from tenant.routing.route import ProviderFigures


@dataclass
class Ledger:
    """What a session has done so far; nothing in it is secret.

    Args:
        pads_redrawn: rows whose helper was lost, late or lied, put on other pads.
        providers: what each of them has done.
        takeovers: requests that one provider failed and another one answered; it cost `takeover_s` seconds in all.
    """

    rows: int = 0
    products: int = 0
    answers_verified: int = 0
    answers_rejected: int = 0
    effects_verified: int = 0
    pads_taken: int = 0
    pads_dry: int = 0
    pads_redrawn: int = 0
    pads_ready: int = 0
    executor_round_trips: int = 0
    helper_round_trips: int = 0
    bytes_to_executors: int = 0
    bytes_from_executors: int = 0
    bytes_to_helpers: int = 0
    bytes_from_helpers: int = 0
    takeovers: int = 0
    takeover_s: float = 0.0
    providers: tuple[ProviderFigures, ...] = ()


class Tally:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._counts = Ledger()
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add to fields of the ledger."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)

    def ledger(self) -> Ledger:
        """As it is now: a copy."""
        with self._lock:
            return replace(self._counts)

    def begin_again(self) -> None:
        """In a forked child: a thread of the parent may have held the lock."""
        self._lock = threading.Lock()
