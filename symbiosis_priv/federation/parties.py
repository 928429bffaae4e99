"""The providers, companies and registries of a federation, and which of them are one party (rules 8 and 11).

Rule 11: the parties of a federation are pairwise distinct in certificate, public key and address. Without rule 11, one
party could appear as two helpers, and an executor that is listed twice could be asked again after its quarantine. Names
and hosts are compared in normal form, so that different spellings of one name are one name.
"""

import ipaddress
import itertools
import socket
import ssl
import unicodedata
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec
from cryptography.hazmat.primitives.serialization import Encoding

from symbiosis_priv.certificates.reading import Pin, fingerprint, key_fingerprint, load_pin
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.errors import ConfigError, RoleConflictError
from symbiosis_priv.limits import Role
from symbiosis_priv.network.addresses import Address, shown

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]  # a name in a federation file

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


if TYPE_CHECKING:
    from symbiosis_priv.network.dial import ClientConnection


@dataclass(frozen=True)
class Peer:
    """One provider in one role, as the tenant pinned it. An executor that a registry listed has no file of its own, and
    is `remote_only` (see `ClientConnection`) unless the federation is local."""

    # hashed by name and role only: every request looks peers up several times, and hashing all fields is slow
    name: str
    operator: str = field(hash=False)
    role: Role
    host: str = field(hash=False)
    port: int = field(hash=False)
    certificate: Pin = field(hash=False)
    next_certificate: Path | None = field(default=None, hash=False)  # pinned too, while the provider rotates
    layers: LayerRange | None = field(default=None, hash=False)  # that it must serve; None if the file does not say
    remote_only: bool = field(default=False, hash=False)
    # further addresses, with the same certificate: each may serve other layers
    others: tuple[Address, ...] = field(default=(), hash=False)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return ((self.host, self.port), *self.others)

    @property
    def by_address(self) -> tuple[Self, ...]:
        """This peer once for each of its addresses. Only all of them together must serve `layers`."""
        if not self.others:
            return (self,)
        return tuple(replace(self, host=host, port=port, others=(), layers=None) for host, port in self.addresses)

    @property
    def pins(self) -> tuple[Pin, ...]:
        """The pinned certificates: two during a rotation."""
        return (self.certificate,) if self.next_certificate is None else (self.certificate, self.next_certificate)

    @property
    def label(self) -> str:
        return f"{self.role} {self.name!r} at {self.where}"

    @property
    def where(self) -> str:
        """The addresses, for messages and tables."""
        return ", ".join(shown(*address) for address in self.addresses)

    def connection(self, context: ssl.SSLContext, **options: Any) -> "ClientConnection":
        """A connection to this peer's first address, which is not open yet. `context` is a `tls.client_context` for
        `pins`; `options` are `traffic` and `waiting` of `ClientConnection`."""
        from symbiosis_priv.network.dial import ClientConnection  # importing torch would delay --help

        options |= {"provider": self.name, "host": self.host, "port": self.port, "pins": self.pins}
        options |= {"remote_only": self.remote_only, "context": context}
        return ClientConnection(self.label, **options)

    @property
    def key_fingerprint(self) -> str:
        """Fingerprint of the public key in `certificate`. Name and key together identify a party (rule 11)."""
        return key_fingerprint(load_pin(self.certificate))


class Company(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Providers that count as one party although their operators have different names. The providers of `operators` may
    be in the file or come from registries. The company's own name is an operator too."""

    name: Name
    members: tuple[Name, ...]
    operators: tuple[Name, ...] = ()


class Registries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The registries (`host:port`) that list more executors, and the authority that signs these executors' certificates
    (several while one replaces another). All registries are asked."""

    addresses: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=16)]
    authority: Path
    revoked: Path | None = None


def check_parties(peers: Sequence[Peer], *, companies: Sequence[Company] = (), pad_helpers: int | None = None) -> None:
    """Checks rules 8 and 11: no two entries are one party, and no company is both executor and helper (which it may be
    if `pad_helpers` helpers are chosen for each pad, see `Federation`). Names, operators and addresses are compared in
    normal form, certificates and public keys by fingerprint, including the next certificates. Raises
    `RoleConflictError`: an executor and a helper have a trait, an operator or a company in common; `ConfigError`: two
    executors or two helpers have a trait in common, or two entries have one name; `CertificateError`: a pinned file
    cannot be read, or does not hold one provider's certificate."""
    known = Parties(peers, companies)
    parties = [(peer, traits(peer)) for peer in peers]
    for (one, mine), (other, theirs) in itertools.combinations(parties, 2):
        shared = in_common(mine, theirs)
        if one.role != other.role and pad_helpers is None:
            if plain(one.operator) == plain(other.operator):
                shared.insert(0, "operator")
            elif known.same(one, other) and "name" not in shared:
                shared.insert(0, "company")
        if not shared:
            continue
        pair = f"{one.role} {one.name!r} and {other.role} {other.name!r} have the same {', '.join(shared)}"
        if shared == ["name"]:
            raise ConfigError(f"{pair}, and case does not count: give each entry a different name")
        if one.role != other.role:
            raise RoleConflictError(
                f"{pair}: together they could remove the mask. Choose a helper of another company, "
                f"or masking = 'local'."
            )
        raise ConfigError(
            f"{pair}: list every party once, each with a different name, certificate, key and address. "
            f"Remove one of the entries, or pin the certificate that its operator gave you."
        )


Traits = Mapping[str, frozenset[object]]
"""The values that must differ between parties, by kind of value, in normal form."""


def in_common(one: Traits, other: Traits) -> list[str]:
    """The kinds of traits that two parties share although rule 11 forbids it; empty if the parties are distinct."""
    return [kind for kind in one if not one[kind].isdisjoint(other[kind])]


def traits(peer: Peer) -> Traits:
    """The traits of a peer. Raises `CertificateError`: a pinned file cannot be read, or is not one provider's."""
    pinned = [load_pin(path) for path in peer.pins]
    return {
        "name": frozenset({plain(peer.name)}),
        "certificate": frozenset(fingerprint(c.public_bytes(Encoding.DER)) for c in pinned),
        "public key": frozenset(map(key_fingerprint, pinned)),
        "address": frozenset((plain_host(host), port) for host, port in peer.addresses),
    }


class Parties:
    """Decides which peers are one party: a union-find over names and operators, so a chain of companies is one."""

    def __init__(self, peers: Sequence[Peer], companies: Sequence[Company]) -> None:
        self._above: dict[Hashable, Hashable] = {}
        for peer in peers:
            self._join(_name(peer.name), _operator(peer.operator))
        for company in companies:
            own = _operator(company.name)
            for mark in (*map(_name, company.members), *map(_operator, company.operators)):
                self._join(own, mark)

    def same(self, one: Peer, other: Peer) -> bool:
        return not self.roots(one).isdisjoint(self.roots(other))

    def roots(self, peer: Peer) -> frozenset[Hashable]:
        """The roots of a peer's name and operator: one root for a peer of the constructor's `peers`. For another peer
        the two roots may differ, because its name and its operator may belong to two companies."""
        return frozenset({self._root(_name(peer.name)), self._root(_operator(peer.operator))})

    def company_of(self, operator: str) -> Hashable:
        """The root of an operator: equal for operators of one company."""
        return self._root(_operator(operator))

    def _join(self, one: Hashable, other: Hashable) -> None:
        self._above[self._root(one)] = self._root(other)

    def _root(self, mark: Hashable) -> Hashable:
        while (above := self._above.get(mark, mark)) != mark:
            mark = above
        return mark


def _name(text: str) -> Hashable:
    return "name", plain(text)


def _operator(text: str) -> Hashable:
    return "operator", plain(text)
