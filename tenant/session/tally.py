"""The counters of a session."""

import threading
from dataclasses import dataclass

from tenant.routing.known_provider import ProviderFigures


@dataclass
class Ledger:
    """Counters of a session. None of them is secret.

    Args:
        pads_redrawn: rows whose pads were replaced, because a helper was lost, late or at fault.
        providers: the figures of each provider.
        rows_relayed: rows whose effects the executor has subtracted.
        rows_corrected: rows whose products left a narrow ring and were corrected.
        rows_repeated: rows whose products left a narrow ring too often, and were multiplied again at half their scale.
        takeovers: requests that one executor failed to answer and another answered. takeover_s: their total delay in
            seconds.
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
    rows_relayed: int = 0
    rows_corrected: int = 0
    rows_repeated: int = 0
    takeovers: int = 0
    takeover_s: float = 0.0
    providers: tuple[ProviderFigures, ...] = ()


class Tally:
    """Counters that several threads add to: `with tally.lock: tally.counts.rows += 1`."""

    def __init__(self) -> None:
        self.counts, self.lock = Ledger(), threading.Lock()
