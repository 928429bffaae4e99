"""Parses `host:port`, listens there, finds IP addresses that a registry must not list, and checks `Host` headers."""

import contextlib
import ipaddress
import re
import socket
from collections.abc import Container, Sequence
from typing import Any, Final

from symbiosis_priv.errors import ConfigError

Address = tuple[str, int]  # host and port
Found = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]
"""An address as `getaddrinfo` returns it."""
_PORT_DIGITS: Final = 5
_METADATA: Final = frozenset(
    map(
        ipaddress.ip_address,
        (
            *("100.100.100.200", "168.63.129.16", "192.0.0.192"),  # Alibaba, Azure, Oracle
            *("fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42"),  # AWS, Google, Oracle, Scaleway
        ),
    )
)  # metadata services of clouds that have no link-local address
_HOST: Final = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{1,5})?", re.ASCII)
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052


def parse_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port` into its parts. Raises `ConfigError`: the text has another form. An IPv6 address
    needs its brackets: `fd00::1:7401` is an address, too."""
    if "://" in address:
        raise ConfigError(f"address {address!r} is a URL: leave out everything but host:port, as in alpha.example:7401")
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else "" if ":" in host else host
    named = host.isprintable() and not any(map(str.isspace, host))  # the resolver does not accept a NUL either
    if not host or not named or not port.isdecimal() or len(port) > _PORT_DIGITS or not int(port) < 1 << 16:
        raise ConfigError(f"address {address!r} is not host:port; write alpha.example:7401, or [::1]:7401")
    return host, int(port)


def shown(host: str, port: int) -> str:
    """Return an address as people write it, and as `parse_address` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address(listen: str) -> str:
    """Return the address at which programs of this machine reach a listener: with the loopback address if it listens on
    all addresses. Raises `ConfigError` as `parse_address` does."""
    host, port = parse_address(listen)
    loopback = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    with contextlib.suppress(ValueError):
        if found := loopback.get(str(ipaddress.ip_address(host))):
            return f"{found}:{port}"
    return listen


def is_internal(address: str) -> bool:
    """Returns True for a loopback address, an address of the link or of a cloud's metadata service, and for an address
    that is not unicast. False for every other address, private networks included, and for a name."""
    try:
        ip = _unmapped(address)
    except ValueError:
        return False
    return (
        ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast or ip.is_reserved or ip in _METADATA
    )


def _unmapped(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IP address, or the IPv4 address to which an IPv6 address leads. Raises ValueError for a name."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        return ip.ipv4_mapped or ip.sixtofour or (ipaddress.IPv4Address(ip.packed[-4:]) if ip in _NAT64 else ip)
    return ip


def is_own(family: socket.AddressFamily, address: tuple[Any, ...]) -> bool:
    """Returns True for an address of this machine, which the kernel would use as the source too. Sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(address)
        return bool(probe.getsockname()[0] == address[0])
    return False


def ways_back(found: Sequence[Found], *, peer: str) -> list[Found]:
    """The addresses of a host that a client at `peer` has announced, to which a registry may connect: one of a family.
    A client with a public address gets public ones of other machines, a client without one also private ones and this
    machine's, and a client of this machine also loopback. Nobody gets addresses of the link or of a metadata service.
    """
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    local, public = _unmapped(peer).is_loopback or is_own(family, (peer, 9)), _unmapped(peer).is_global
    ways: dict[socket.AddressFamily, Found] = {}
    for one in found:
        family, address, ip = one[0], one[4], _unmapped(one[4][0])
        far = not is_internal(address[0]) and (not public or (ip.is_global and not is_own(family, address)))
        if far or (local and (ip.is_loopback or not is_internal(address[0]))):
            ways.setdefault(family, one)
    return list(ways.values())


def listen(address: str, *, backlog: int | None = None) -> socket.socket:
    """Open a listening socket at `host:port`. Raises `ConfigError`."""
    host, port = parse_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)[0][4]
        return socket.create_server(found, family=family, backlog=backlog)
    except (OSError, ValueError) as error:  # ValueError: the host is not a valid name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"listen = {address!r}: {reason}; choose another address") from error


def bound_address(listener: socket.socket) -> str:
    return shown(*listener.getsockname()[:2])


def names_host(headers: Sequence[str], hosts: Container[str]) -> bool:
    """Returns True if there is one `Host` header, and it is an IP address or one of `hosts` (in lower case). A web page
    can make a name of its own resolve to loopback (DNS rebinding), but cannot send another `Host` header."""
    found = _HOST.fullmatch(headers[0].lower()) if len(headers) == 1 else None
    if found is None:
        return False
    name, in_brackets = found["name"], found["v6"]
    try:
        return name in hosts or bool(ipaddress.IPv6Address(in_brackets) if in_brackets else ipaddress.IPv4Address(name))
    except ValueError:
        return False
