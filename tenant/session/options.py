"""How a session behaves."""

from __future__ import annotations

from dataclasses import dataclass

from tenant.connections.channel import DEADLINE_OPTION, Wiretap
from tenant.routing.health import USUAL, Tolerance


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """How a session behaves.

    Args:
        masking: the name of a `SessionScheme`.
        deadline_s: how long one request may take, reconnecting included.
        deadline_option: the user's name for it, for messages.
        pool_memory: bytes for pads that are drawn ahead.
        row_bucket: row counts are rounded up to a multiple of this before anything is sent.
        piece_bytes: products of more than twice this, rows and answers together, go out in pieces of about so many
            bytes, over several connections.
        tolerance: when a provider counts as late, and for how long a failed one is not asked.
        wiretap: an observer of every frame (tests, reviewers), or None.
    """

    masking: str = "pad"
    deadline_s: float = 120.0
    deadline_option: str = DEADLINE_OPTION
    pool_memory: int = 256 << 20
    row_bucket: int = 1
    piece_bytes: int = 4 << 20
    tolerance: Tolerance = USUAL
    wiretap: Wiretap | None = None
