"""What one registry listens at, is known by, and takes in at most."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from provider.registry.storage import MAX_LOG_BYTES
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.registry.descriptor import MAX_LIFETIME_S

DAY_S: Final = 86_400


@dataclass(frozen=True, kw_only=True)
class RegistryConfig:
    """One registry.

    Args:
        listen: `host:port`; port 0 takes a free one.
        certificate: a provider's, issued by the federation's authority for this registry's hosts. The name in it is the
            registry's.
        key: its private key.
        authority: of the federation, whose executors are listed. All of these files are read again when they change.
        revoked: list of certificates that it does not vouch for any more.
        database: of the log; in memory if None.
        max_connections: at a time; one more closes the oldest of the busiest network.
        frame_timeout_s: for the handshake, for a frame, and for the next one to begin.
        connection_s: how long a connection may last.
        requests_per_s: of one network; ten seconds' worth at once. Who asks for more is told so, and hung up on.
        announcements_per_h: of one executor, on average; a quarter of them at once.
        max_log_mib: that its log may take: also what a registry that is replicated makes up.
        retain_days: how long the log keeps what has expired: at least for as long as any descriptor may live, so that
            an older one of a key cannot come back.
    """

    listen: str
    certificate: Path
    key: Path
    authority: Path
    revoked: Path | None = None
    database: Path | None = None
    max_connections: int = 256
    frame_timeout_s: float = 10.0
    connection_s: float = 60.0
    requests_per_s: float = 10.0
    announcements_per_h: float = 60.0
    max_log_mib: int = MAX_LOG_BYTES >> 20
    retain_days: float = 7.0

    def __post_init__(self) -> None:
        if self.retain_days * DAY_S < MAX_LIFETIME_S:
            raise ConfigError(f"retain_days = {self.retain_days:g} is below {MAX_LIFETIME_S / DAY_S:g}")
