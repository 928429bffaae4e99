from dataclasses import dataclass

from symbiosis_priv.limits import DEFAULT_RING_BITS, RingBits
from tenant.connections.channel import DEADLINE_OPTION, Wiretap
from tenant.routing.health import USUAL, Tolerance


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """Options of a session.

    Args:
        masking: the name of a `SessionScheme`.
        deadline_s: maximum duration of one request, reconnecting included.
        deadline_option: the option that sets `deadline_s`, for messages.
        pool_memory: bytes for pads that are drawn ahead.
        row_bucket: row counts are rounded up to a multiple of this before anything is sent.
        ring_bits: bits of the integers on the wire (`tenant.options`).
        part_bytes: products of more than twice this size, rows and answers together, are sent in parts of about this
            size, over several connections.
        tolerance: when a provider counts as late, and how long a failed provider is not asked.
        wiretap: an observer of every frame (tests, reviewers), or None.
    """

    masking: str = "pad"
    deadline_s: float = 120.0
    deadline_option: str = DEADLINE_OPTION
    pool_memory: int = 256 << 20
    row_bucket: int = 1
    ring_bits: RingBits = DEFAULT_RING_BITS
    part_bytes: int = 4 << 20
    tolerance: Tolerance = USUAL
    wiretap: Wiretap | None = None
