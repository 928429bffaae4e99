"""A registry: stores the newest signed descriptor of each executor, and lists the descriptors to tenants.

Read in this order:

    store     the newest descriptor of each key
    server    answers requests, within limits and rates
    cli       the command `symbiosis-priv registry`
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RegistryConfig:
    """The configuration of one registry. Certificate, key, authority and revoked are read again when the files change.
    Rate limits allow bursts: of ten seconds' requests, and of a quarter hour's announcements."""

    certificate: Path  # a provider's, which the federation's authority has issued for this registry's hosts
    key: Path
    authority: Path  # CA certificates of the federation
    revoked: Path | None = None
    listen: str = "127.0.0.1:7500"  # port 0 takes a free one
    max_connections: int = 256  # one more closes a connection of the busiest network
    frame_timeout_s: float = 10.0  # for the handshake, for a frame, and until the next frame begins
    connection_s: float = 60.0  # longest duration of a connection
    requests_per_s: float = 10.0  # of one network; a connection above it is closed
    announcements_per_h: float = 60.0  # of one executor
