"""A registry: stores the newest signed descriptor of each executor, and lists the descriptors to tenants.

Read in this order:

    store     the newest descriptor of each key, in SQLite
    server    answers requests, within limits and rates
    cli       the command `symbiosis-priv registry`
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RegistryConfig:
    """The configuration of one registry. Certificate, key, authority and revoked are read again when the files change.

    Args:
        certificate: a provider certificate that the federation's authority has issued for this registry's hosts.
        authority: CA certificates of the federation.
        listen: `host:port`; port 0 takes a free one.
        database: SQLite file; None keeps the descriptors in memory.
        max_connections: largest number of open connections. One more closes a connection of the busiest network.
        frame_timeout_s: time for the handshake, for a frame, and until the next frame begins.
        connection_s: longest duration of a connection.
        requests_per_s: rate limit of one network, with a burst of ten seconds' worth. A connection above it is closed.
        announcements_per_h: rate limit of one executor, with a burst of a quarter hour's worth.
    """

    certificate: Path
    key: Path
    authority: Path
    revoked: Path | None = None
    listen: str = "127.0.0.1:7500"
    database: Path | None = None
    max_connections: int = 256
    frame_timeout_s: float = 10.0
    connection_s: float = 60.0
    requests_per_s: float = 10.0
    announcements_per_h: float = 60.0
