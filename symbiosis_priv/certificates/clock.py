"""The current time, in one place, so that tests can replace it."""

from datetime import UTC, datetime


def now() -> datetime:
    """The current time in UTC."""
    return datetime.now(UTC)
