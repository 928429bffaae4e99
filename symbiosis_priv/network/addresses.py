"""`host:port`, as people write it."""

from __future__ import annotations

from symbiosis_priv.errors import ConfigError

_PORT_DIGITS = 5


def parse_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` to its parts."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    named = host.isprintable() and not any(map(str.isspace, host))  # nor is a NUL for the resolver
    if not host or not named or not port.isdecimal() or len(port) > _PORT_DIGITS or not int(port) < 1 << 16:
        raise ConfigError(f"address {address!r} is not host:port; write alpha.example:7401, or [::1]:7401")
    return host, int(port)
