"""Normal forms of names and hosts, so that different spellings of one name compare equal."""

import ipaddress
import itertools
import socket
import unicodedata
from contextlib import suppress
from functools import lru_cache

from symbiosis_priv.errors import ConfigError

_THIS_MACHINE = "127.0.0.1"
# Characters that remain after NFKC and are invisible, but have a visible category: fillers, joiners, selectors, blanks.
_BLANK_SYMBOLS = (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x1D159, 0x13441, 0x13442, 0x16FE4)
_BLANK_RANGES = (range(0x180B, 0x1810), range(0xFE00, 0xFE10), range(0xE0000, 0xE1000))
_BLANK = frozenset(map(chr, itertools.chain(_BLANK_SYMBOLS, *_BLANK_RANGES)))
_LOOK_LATIN = str.maketrans(  # Cyrillic, Greek and Latin letters whose small or capital form looks like a Latin letter
    "\u0430\u0432\u0435\u043a\u043c\u043d\u043e\u0440\u0441\u0442"
    "\u0443\u0445\u0456\u0458\u0455\u0501\u04bb\u04cf\u051b\u051d"
    "\u03b1\u03b2\u03b5\u03b6\u03b7\u03b9\u03ba\u03bc\u03bd\u03bf\u03c1\u03c4\u03c5\u03c7\u0131\u0251\u0261",
    "abekmhopctyxijsdhlqwabezhikmnoptyxiag",
)
_WRITTEN_TOGETHER = (  # Unicode Technical Standard 39, "highly restrictive"
    frozenset({"LATIN", "CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"}),
    frozenset({"LATIN", "CJK", "BOPOMOFO"}),
    frozenset({"LATIN", "CJK", "HANGUL"}),
)


@lru_cache(maxsize=1024)  # called for every pad that is drawn
def plain(name: str) -> str:
    """The normal form of a name: NFKC, case folded, without blank and control characters, and with Latin letters in
    place of letters that look like them. Two names with one normal form are the same name."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    visible = "".join(c for c in folded if unicodedata.category(c)[0] not in "CZ" and c not in _BLANK)
    return visible.translate(_LOOK_LATIN)


def check_spelling(name: str) -> None:
    """Raises `ConfigError` for a name without visible characters, and for a name that mixes scripts which are not
    written together: with a Cyrillic letter among Latin letters, two different names look alike."""
    if not plain(name):
        raise ConfigError(f"the name {name!r} has no visible characters: write a name")
    # with the marks of letters: many fonts show nothing for a mark of another script
    letters = [c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c)[0] in "LM" and c not in _BLANK]
    scripts = {unicodedata.name(c, "UNKNOWN").split()[0] for c in letters} - {"MODIFIER", "COMBINING"}
    if len(scripts) > 1 and not any(scripts <= together for together in _WRITTEN_TOGETHER):
        raise ConfigError(
            f"the name {name!a} mixes letters of {' and '.join(sorted(scripts))}, which can look alike: type it "
            f"again in one script"
        )


def plain_host(host: str) -> str:
    """The normal form of a host: lower case, no trailing dot, IDNA, one form of an IP address, and 127.0.0.1 for names
    and unspecified addresses of this machine. Sends no DNS query."""
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
    """Returns True for a loopback address and for a name of this machine. Sends no DNS query."""
    try:
        return ipaddress.ip_address(plain_host(host)).is_loopback
    except ValueError:
        return False
