"""One spelling of names and hosts that can be written in many ways."""

from __future__ import annotations

import ipaddress
import socket
import unicodedata
from contextlib import suppress
from functools import lru_cache

_THIS_MACHINE = "127.0.0.1"
# Unicode's Default_Ignorable_Code_Point after NFKC, where the category does not say it: joiners, fillers, selectors.
_INVISIBLE = frozenset(
    map(chr, (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10)))
) | frozenset(map(chr, range(0xE0000, 0xE1000)))


@lru_cache(maxsize=1024)  # asked for every pad that is drawn
def plain(name: str) -> str:
    """What is left of a name when case, spacing, invisible characters and Unicode's ways to write it do not count."""
    spaced = " ".join(unicodedata.normalize("NFKC", name).split())
    visible = "".join(c for c in spaced if unicodedata.category(c) not in ("Cc", "Cf") and c not in _INVISIBLE)
    return unicodedata.normalize("NFKC", " ".join(visible.split()).casefold())


def plain_host(host: str) -> str:
    """The same for a host: also a trailing dot, forms of one IP address, and names of this machine. Asks no DNS."""
    host = host.casefold().rstrip(".")
    with suppress(UnicodeError):
        host = host.encode("idna").decode("ascii")
    with suppress(OSError):
        host = socket.inet_ntoa(socket.inet_aton(host))  # 127.1 and 0x7f000001, as the resolver reads them
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return _THIS_MACHINE if host == "localhost" or host.endswith(".localhost") else host
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    return _THIS_MACHINE if address.is_unspecified or str(address) == "::1" else str(address)


def is_this_machine(host: str) -> bool:
    """Returns True for a loopback address and for a name of this machine. Asks no DNS."""
    try:
        return ipaddress.ip_address(plain_host(host)).is_loopback
    except ValueError:
        return False
