"""One spelling of names and hosts that can be written in many ways."""

from __future__ import annotations

import ipaddress
import itertools
import socket
import unicodedata
from contextlib import suppress
from functools import lru_cache

from symbiosis_priv.errors import ConfigError

_THIS_MACHINE = "127.0.0.1"
# Characters without a picture whose category does not say so, after NFKC: fillers, joiners, selectors, blank symbols.
_BLANK_SYMBOLS = (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x1D159, 0x16FE4)
_BLANK_RANGES = (range(0x180B, 0x1810), range(0xFE00, 0xFE10), range(0xE0000, 0xE1000))
_BLANK = frozenset(map(chr, itertools.chain(_BLANK_SYMBOLS, *_BLANK_RANGES)))
_WRITTEN_TOGETHER = (  # Unicode Technical Standard 39, "highly restrictive"
    frozenset({"LATIN", "CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"}),
    frozenset({"LATIN", "CJK", "BOPOMOFO"}),
    frozenset({"LATIN", "CJK", "HANGUL"}),
)


@lru_cache(maxsize=1024)  # called for every pad that is drawn
def plain(name: str) -> str:
    """A name without case, blanks of any kind, and Unicode's different ways to write one character. Two names are the
    same if this is."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return "".join(c for c in folded if unicodedata.category(c)[0] not in "CZ" and c not in _BLANK)


def check_spelling(name: str) -> None:
    """Raises `ConfigError` for a name that shows nothing, and for one whose letters are of scripts that are not written
    together: a Cyrillic letter among Latin ones looks like another name."""
    if not plain(name):
        raise ConfigError(f"the name {name!r} shows nothing: write a name")
    letters = [c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c)[0] == "L"]
    scripts = {unicodedata.name(c, "UNKNOWN").split()[0] for c in letters} - {"MODIFIER"}
    if len(scripts) > 1 and not any(scripts <= together for together in _WRITTEN_TOGETHER):
        raise ConfigError(
            f"the name {name!a} mixes letters of {' and '.join(sorted(scripts))}, which can look alike: type it "
            f"again in one script"
        )


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
