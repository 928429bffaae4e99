"""The present moment, in one place: lifetimes are tested against others."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> datetime:
    """In UTC."""
    return datetime.now(UTC)
