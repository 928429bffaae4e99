"""Formats a session's counters: round trips, bytes and verified rows."""

from dataclasses import fields

from torch import nn

from tenant.masking.backend import RingBackend
from tenant.model.hf import backend_of
from tenant.session.session import Session
from tenant.session.tally import Ledger


def session_of(model: nn.Module) -> Session | None:
    """Return a split model's session; None for schemes without one ("simulate", "paper-pool")."""
    backend = backend_of(model)
    session = backend.products if isinstance(backend, RingBackend) else None
    return session if isinstance(session, Session) else None


def ledger_of(model: nn.Module) -> Ledger | None:
    """Return the counters of a split model's session; None without one."""
    session = session_of(model)
    return None if session is None else session.ledger()


def since(before: Ledger, now: Ledger) -> Ledger:
    """Return the difference of two readings of the counters; `providers` are those of `now`."""
    counts = [field.name for field in fields(Ledger) if field.name != "providers"]
    return Ledger(**{name: getattr(now, name) - getattr(before, name) for name in counts}, providers=now.providers)


def table_rows(ledger: Ledger, *, tokens: int) -> list[tuple[str, str]]:
    """Return the rows (label, figure) of a table. Figures per token are totals divided by `tokens`."""

    def per_token(total: float) -> float:
        return total / tokens if tokens else 0.0

    trips, helper_trips = ledger.executor_round_trips, ledger.helper_round_trips
    up, down = ledger.bytes_to_executors, ledger.bytes_from_executors
    takeovers = ledger.takeovers > 0
    wraps = f"{ledger.rows_corrected:,} corrected, {ledger.rows_repeated:,} sent again"
    return [
        ("round trips to executors", f"{trips:,} ({per_token(trips):.2f} per token)"),
        ("round trips to helpers", f"{helper_trips:,}"),
        ("to executors, per token", size(per_token(up))),
        ("from executors, per token", size(per_token(down))),
        ("effects from helpers, per token", size(per_token(ledger.bytes_from_helpers))),
        ("answer rows verified", f"{ledger.answers_verified:,}"),
        ("effect rows verified", f"{ledger.effects_verified:,}"),
        ("answers rejected", f"{ledger.answers_rejected:,}"),
        *([("rows that left a narrow ring", wraps)] * (ledger.rows_corrected + ledger.rows_repeated > 0)),
        *([("takeovers by another executor", f"{ledger.takeovers:,}, in {ledger.takeover_s:.1f} s")] * takeovers),
    ]


def summary(ledger: Ledger) -> str:
    """Return round trips, bytes and verified rows as one line of text."""
    up = ledger.bytes_to_executors + ledger.bytes_to_helpers
    down = ledger.bytes_from_executors + ledger.bytes_from_helpers
    return (
        f"{ledger.executor_round_trips:,} round trips, {size(up)} up, {size(down)} down, "
        f"{ledger.answers_verified:,} answer rows verified, {ledger.answers_rejected:,} answers rejected"
    )


def size(count: float) -> str:
    """Return a number of bytes as text with a binary prefix, such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
