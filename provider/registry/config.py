"""The options and limits of a registry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RegistryConfig:
    """One registry. Certificate, key, authority and revoked are read again when the files change.

    Args:
        certificate: a provider's, issued by the federation's authority for this registry's hosts.
        key: private key of the certificate.
        authority: CA certificates of the federation.
        revoked: list of revoked certificates.
        listen: `host:port`; port 0 takes a free one.
        database: SQLite file; None keeps the descriptors in memory.
        max_connections: at a time; one more closes the oldest of the busiest network.
        frame_timeout_s: for the handshake, for a frame, and for the next frame to begin.
        connection_s: how long a connection may last.
        requests_per_s: of one network, with a burst of ten seconds' worth. A connection that exceeds it is closed.
        announcements_per_h: of one executor, with a burst of a quarter hour's worth.
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
