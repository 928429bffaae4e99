"""What a model's session has cost and checked, for people to read."""

from __future__ import annotations

from dataclasses import fields

from torch import nn

from tenant.masking.backend import RingBackend
from tenant.model.hf import backend_of
from tenant.session.session import Session
from tenant.session.tally import Ledger


def ledger_of(model: nn.Module) -> Ledger | None:
    """The counters of a split model's session; None where there are none ("simulate", "paper-pool")."""
    backend = backend_of(model)
    session = backend.products if isinstance(backend, RingBackend) else None
    return session.ledger() if isinstance(session, Session) else None


def since(before: Ledger, now: Ledger) -> Ledger:
    """What happened between two readings; `providers` are as they are now."""
    counts = [field.name for field in fields(Ledger) if field.name != "providers"]
    return Ledger(**{name: getattr(now, name) - getattr(before, name) for name in counts}, providers=now.providers)


def rows(ledger: Ledger, *, tokens: int) -> list[tuple[str, str]]:
    """Label and figure, one per line of a table.

    Args:
        tokens: how many tokens the ledger covers, for the figures per token.
    """
    trips, helper_trips = ledger.executor_round_trips, ledger.helper_round_trips
    up, down = ledger.bytes_to_executors, ledger.bytes_from_executors
    takeovers = ledger.takeovers > 0
    return [
        ("round trips to executors", f"{trips:,} ({_ratio(trips, tokens):.2f} per token)"),
        ("round trips to helpers", f"{helper_trips:,}"),
        ("to executors, per token", size(_ratio(up, tokens))),
        ("from executors, per token", size(_ratio(down, tokens))),
        ("effects from helpers, per token", size(_ratio(ledger.bytes_from_helpers, tokens))),
        ("answer rows verified", f"{ledger.answers_verified:,}"),
        ("effect rows verified", f"{ledger.effects_verified:,}"),
        ("answers rejected", f"{ledger.answers_rejected:,}"),
        *([("taken over from others", f"{ledger.takeovers:,}, within {ledger.takeover_s:.1f} s in all")] * takeovers),
    ]


def one_line(ledger: Ledger) -> str:
    """The same in one line."""
    up = ledger.bytes_to_executors + ledger.bytes_to_helpers
    down = ledger.bytes_from_executors + ledger.bytes_from_helpers
    return (
        f"{ledger.executor_round_trips:,} round trips, {size(up)} up, {size(down)} down, "
        f"{ledger.answers_verified:,} answer rows verified, {ledger.answers_rejected:,} answers rejected"
    )


def size(count: float) -> str:
    """Bytes with a binary prefix."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else 0.0
