"""`federation.toml`: which providers a tenant uses, in which roles, and which model they must serve.

[model]
digest = "sha256:..."            # from `symbiosis-priv provider manifest`; checked against the tenant's own copy
weight_bits = 10

[tenant]
certificate = "keys/alice.pem"   # paths are relative to this file
key = "keys/alice.key"

[[provider]]
name = "alpha"
operator = "Alpha GmbH"          # who runs it: executor and helper must never be the same operator (rule 8)
role = "executor"
address = "alpha.example:7401"
certificate = "keys/alpha.pem"   # pinned: nothing else is accepted. One certificate per file
# next_certificate = "keys/alpha-next.pem"   # while alpha renews its certificate: accepted too
# layers = "0-15"                # it must serve these; whatever it says it serves, if left out

[pads]
helpers = 2                      # so many helpers share each pad, others are spares. Without it all share every pad

[[company]]                      # these count as one party, and so do providers with one operator
name = "Holding SE"
members = ["alpha", "gamma"]     # names of providers
operators = ["Delta AG"]         # operators that are not listed as providers here

[registry]                       # further executors are found here; helpers never are
addresses = ["registry.example:7500"]
authority = "keys/federation.pem"   # vouches for them and for who runs them
# revoked = "keys/revoked.txt"   # whom it does not vouch for any more

Rule 8: whoever knows a pad's seed never sees a row masked with it, and what one of a company's providers knows, all of
them know. Without `[pads]` every helper shares every pad, so a company that has both roles is refused. With
`helpers = k` the tenant takes for each executor k helpers of k companies other than its own; refused is what leaves no
such choice.

Rule 11: the parties of a federation are pairwise distinct in certificate, public key and address. Two helpers with one
key would otherwise be one party, and an executor listed twice would be asked again after its quarantine.
"""

from __future__ import annotations

import ipaddress
import itertools
import socket
import tomllib
import unicodedata
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from cryptography.hazmat.primitives.serialization import Encoding

from symbiosis_priv.certificates import Pin, fingerprint, key_fingerprint, load_pin
from symbiosis_priv.errors import CertificateError, ConfigError, RoleConflictError
from symbiosis_priv.layers import LayerRange
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS, Role

T = TypeVar("T")
_PORT_DIGITS = 5
_THIS_MACHINE = "127.0.0.1"
_FEWEST_MEMBERS = 2
# Unicode's Default_Ignorable_Code_Point after NFKC, where the category does not say it: joiners, fillers, selectors.
_INVISIBLE = frozenset(
    map(chr, (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10)))
) | frozenset(map(chr, range(0xE0000, 0xE1000)))
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Model(_Section, frozen=True):
    digest: Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$")]
    weight_bits: Annotated[int, msgspec.Meta(ge=MIN_WEIGHT_BITS, le=MAX_WEIGHT_BITS)] = DEFAULT_WEIGHT_BITS


class _Tenant(_Section, frozen=True):
    certificate: Path
    key: Path


class _Provider(_Section, frozen=True):
    name: _Name
    operator: _Name
    role: Role
    address: str
    certificate: Path
    next_certificate: Path | None = None
    layers: str | None = None


class _Pads(_Section, frozen=True):
    helpers: Annotated[int, msgspec.Meta(ge=1)]


class _Company(_Section, frozen=True):
    name: _Name
    members: list[_Name]
    operators: list[_Name] = []


class _Registry(_Section, frozen=True):
    addresses: Annotated[list[str], msgspec.Meta(min_length=1, max_length=16)]
    authority: Path
    revoked: Path | None = None


class _File(_Section, frozen=True):
    model: _Model
    tenant: _Tenant
    provider: Annotated[list[_Provider], msgspec.Meta(min_length=1)]
    pads: _Pads | None = None
    company: list[_Company] = []
    registry: _Registry | None = None


@dataclass(frozen=True)
class Peer:
    """One provider in one role, as the tenant pinned it.

    Args:
        certificate: the pinned one: a file with it and nothing else, or itself, of an executor that was discovered.
        next_certificate: the same for its successor while the provider rotates.
        layers: what it must serve at least; None if what it says itself is all that is known.
    """

    name: str
    operator: str
    role: Role
    host: str
    port: int
    certificate: Pin
    next_certificate: Path | None = None
    layers: LayerRange | None = None

    @property
    def pins(self) -> tuple[Pin, ...]:
        """The pinned certificates: two during a rotation."""
        return (self.certificate,) if self.next_certificate is None else (self.certificate, self.next_certificate)

    @property
    def key_fingerprint(self) -> str:
        """Of the public key in `certificate`. With the name it tells this party from every other one (rule 11)."""
        return key_fingerprint(load_pin(self.certificate))


@dataclass(frozen=True)
class Company:
    """What counts as one party beyond a common operator.

    Args:
        members: names of providers.
        operators: of providers wherever they come from. The company's own name is one of them.
    """

    name: str
    members: tuple[str, ...]
    operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class Registries:
    """Where executors are found that are not in the file, and who vouches for them.

    Args:
        addresses: `host:port` of registries; all of them are asked.
        authority: file with the authority's certificate, or several while one replaces another.
        revoked: file of fingerprints of certificates that it does not vouch for any more.
    """

    addresses: tuple[str, ...]
    authority: Path
    revoked: Path | None = None


@dataclass(frozen=True)
class Federation:
    """A parsed and checked `federation.toml`.

    Args:
        companies: who counts as one party although the operators' names differ.
        pad_helpers: how many helpers share each pad, the others being spares. None: all share every pad.
        registries: where more executors are found; None: there are those of the file and no others.
    """

    model_digest: str
    weight_bits: int
    tenant_certificate: Path
    tenant_key: Path
    peers: tuple[Peer, ...]
    companies: tuple[Company, ...] = ()
    pad_helpers: int | None = None
    registries: Registries | None = None

    @property
    def executors(self) -> tuple[Peer, ...]:
        """Providers that see masked rows, as far as the file lists them."""
        return tuple(p for p in self.peers if p.role == "executor")

    @property
    def helpers(self) -> tuple[Peer, ...]:
        """Providers that see a seed and never a row."""
        return tuple(p for p in self.peers if p.role == "helper")

    def one_company(self, one: Peer, other: Peer) -> bool:
        """Whether what one of them knows, the other may know. Also for peers that are not in the file.

        They have an operator or a name in common, or a chain of companies and operators leads from one to the other.
        """
        return self._parties.same(one, other)

    def admissible(self, executor: Peer, holders: Collection[Peer]) -> bool:
        """Rule 8: whether rows may go to an executor under pads whose seeds are known to these helpers, by company."""
        return not any(self.one_company(executor, holder) for holder in holders)

    def companies_of(self, peers: Collection[Peer]) -> int:
        """How many companies these peers are: so many that none of them knows what another one does."""
        parties = _Parties([*self.peers, *peers], self.companies)
        return len({parties.roots(peer) for peer in peers})

    @cached_property
    def _parties(self) -> _Parties:
        return _Parties(self.peers, self.companies)


def load_toml(path: Path, kind: type[T]) -> T:
    """Read a TOML file into a typed, closed structure; every error names the file and the key.

    Fields of type `Path` are read relative to the file.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error

    def relative(kind: type, value: object) -> Path:
        if kind is Path and isinstance(value, str):
            return path.parent / Path(value).expanduser()
        raise ValueError("expected a path in quotes")

    try:
        return msgspec.convert(data, kind, dec_hook=relative)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` to its parts."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or len(port) > _PORT_DIGITS or not int(port) < 1 << 16:
        raise ConfigError(f"address {address!r} is not host:port; write alpha.example:7401, or [::1]:7401")
    return host, int(port)


def load_federation(path: str | Path) -> Federation:
    """Read and check a federation file.

    Raises:
        ConfigError: unreadable, an unknown or missing key, no executor, two entries that are one party.
        RoleConflictError: one party, or one company, is both executor and helper; with `[pads]`, some executor is left
            without enough helpers of other companies.
        CertificateError: a pinned file cannot be read, or does not hold one provider's certificate.
    """
    path = Path(path)
    file = load_toml(path, _File)
    peers = [_peer(entry, path) for entry in file.provider]
    federation = Federation(
        model_digest=file.model.digest,
        weight_bits=file.model.weight_bits,
        tenant_certificate=file.tenant.certificate,
        tenant_key=file.tenant.key,
        peers=tuple(peers),
        companies=tuple(Company(c.name, tuple(c.members), tuple(c.operators)) for c in file.company),
        pad_helpers=file.pads.helpers if file.pads else None,
        registries=_registries(file.registry, path) if file.registry else None,
    )
    if not federation.executors and file.registry is None:
        raise ConfigError(f"{path}: no [[provider]] has role = 'executor', and there is no [registry] to find one in")
    try:
        _check_companies(federation)
        check_parties(peers, companies=federation.companies, pad_helpers=federation.pad_helpers)
        _check_choice(federation)
    except (ConfigError, CertificateError) as error:
        raise type(error)(f"{path}: {error}") from error
    return federation


def _registries(section: _Registry, path: Path) -> Registries:
    for address in section.addresses:
        try:
            parse_address(address)
        except ConfigError as error:
            raise ConfigError(f"{path}, [registry]: {error}") from error
    return Registries(tuple(section.addresses), section.authority, section.revoked)


def _peer(entry: _Provider, path: Path) -> Peer:
    try:
        host, port = parse_address(entry.address)
        layers = None if entry.layers is None else LayerRange.parse(entry.layers)
    except ConfigError as error:
        raise ConfigError(f"{path}, provider {entry.name!r}: {error}") from error
    if not port:
        raise ConfigError(f"{path}, provider {entry.name!r}: nobody listens at port 0; ask its operator for the port")
    return Peer(
        name=entry.name,
        operator=entry.operator,
        role=entry.role,
        host=host,
        port=port,
        certificate=entry.certificate,
        next_certificate=entry.next_certificate,
        layers=layers,
    )


def check_parties(peers: Sequence[Peer], *, companies: Sequence[Company] = (), pad_helpers: int | None = None) -> None:
    """Rules 8 and 11: no two entries are one party, and no company is both executor and helper.

    Names, operators and addresses are compared as they are meant, not as they are spelled; certificates and public keys
    by fingerprint, the next ones included.

    Args:
        companies: who else counts as one party.
        pad_helpers: as `Federation.pad_helpers`. If helpers are chosen for each pad, a company may have both roles.

    Raises:
        RoleConflictError: an executor and a helper have something in common.
        ConfigError: two of one role have.
        CertificateError: a pinned file cannot be read, or does not hold one provider's certificate.
    """
    known = _Parties(peers, companies)
    parties = [(peer, traits(peer)) for peer in peers]
    for (one, mine), (other, theirs) in itertools.combinations(parties, 2):
        shared = in_common(mine, theirs)
        if one.role != other.role and pad_helpers is None:
            if _plain(one.operator) == _plain(other.operator):
                shared.insert(0, "operator")
            elif known.same(one, other) and "name" not in shared:
                shared.insert(0, "company")
        if not shared:
            continue
        pair = f"{one.role} {one.name!r} and {other.role} {other.name!r} have the same {', '.join(shared)}"
        if shared == ["name"]:
            raise ConfigError(f"{pair}, and case does not count: give each of them its own")
        if one.role != other.role:
            raise RoleConflictError(
                f"{pair}: together they would see everything. Choose a helper that somebody else runs, "
                f"or masking = 'local'."
            )
        raise ConfigError(
            f"{pair}: every party is listed once, under a name, a certificate, a key and an address of its own. "
            f"Remove one of the entries, or pin what its own operator gave you."
        )


Traits = Mapping[str, frozenset[object]]
"""What must tell a party from others, each in one spelling."""


def in_common(one: Traits, other: Traits) -> list[str]:
    """What two parties have in common that must tell them apart (rule 11); nothing if they are distinct."""
    return [what for what in one if not one[what].isdisjoint(other[what])]


def traits(peer: Peer) -> Traits:
    """A peer's. CertificateError if its pinned file cannot be read, or does not hold one provider's certificate."""
    pinned = [load_pin(path) for path in peer.pins]
    return {
        "name": frozenset({_plain(peer.name)}),
        "certificate": frozenset(fingerprint(c.public_bytes(Encoding.DER)) for c in pinned),
        "public key": frozenset(map(key_fingerprint, pinned)),
        "address": frozenset({(_plain_host(peer.host), peer.port)}),
    }


class _Parties:
    """Who counts as one: a union-find over names and operators, so that a chain of companies is one company."""

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
        """One for a peer that was given at the start; a stranger's name and operator may belong to two companies."""
        return frozenset({self._root(_name(peer.name)), self._root(_operator(peer.operator))})

    def _join(self, one: Hashable, other: Hashable) -> None:
        self._above[self._root(one)] = self._root(other)

    def _root(self, mark: Hashable) -> Hashable:
        while (above := self._above.get(mark, mark)) != mark:
            mark = above
        return mark


def _name(text: str) -> Hashable:
    return "name", _plain(text)


def _operator(text: str) -> Hashable:
    return "operator", _plain(text)


def _check_companies(federation: Federation) -> None:
    listed = {_plain(peer.name) for peer in federation.peers}
    called: set[str] = set()
    for company in federation.companies:
        if _plain(company.name) in called:
            raise ConfigError(f"two [[company]] are called {company.name!r}: list their members together")
        called.add(_plain(company.name))
        if unknown := [name for name in company.members if _plain(name) not in listed]:
            known = ", ".join(repr(peer.name) for peer in federation.peers)
            raise ConfigError(
                f"company {company.name!r}: no [[provider]] is called {unknown[0]!r}; there are {known}. "
                f"Who is not listed as a provider goes into operators = [...]"
            )
        for key, entries in (("members", company.members), ("operators", company.operators)):
            plain = [_plain(entry) for entry in entries]
            if twice := [entry for entry in entries if plain.count(_plain(entry)) > 1]:
                raise ConfigError(f"company {company.name!r} lists {twice[0]!r} twice in {key}: remove one of them")
        if len(company.members) + len(company.operators) < _FEWEST_MEMBERS:
            raise ConfigError(
                f"company {company.name!r} joins nobody: list two or more members, or remove this [[company]]"
            )


def _check_choice(federation: Federation) -> None:
    """With `[pads]`: for every executor, and every layer as far as the file says, enough helpers of other companies."""
    k = federation.pad_helpers
    if k is None:
        return
    helpers = federation.helpers
    if k > len(helpers):
        raise ConfigError(
            f"[pads] helpers = {k}, and {len(helpers)} [[provider]] have role = 'helper': add helpers, or lower it"
        )
    for executor in federation.executors:
        others = [helper for helper in helpers if federation.admissible(executor, [helper])]
        layers = _turning_points(executor.layers, helpers)
        found = {layer: federation.companies_of([h for h in others if _may_serve(h, layer)]) for layer in layers}
        short = {layer: there for layer, there in found.items() if there < k}
        # Of an executor that does not say what it serves, some layer with a choice is all that can be asked for.
        if short and (executor.layers is not None or len(short) == len(found)):
            layer, there = next(iter(short.items()))
            where = f" at layer {layer}" if any(helper.layers for helper in helpers) else ""
            raise RoleConflictError(
                f"executor {executor.name!r} has helpers of {there} companies other than its own{where}, and [pads] "
                f"helpers = {k} takes {k} of different companies for each pad: add helpers that others run, or lower it"
            )


def _turning_points(layers: LayerRange | None, helpers: Sequence[Peer]) -> list[int]:
    """The layers of a range where the set of helpers that serve may change, its first one included."""
    bounds = {bound for h in helpers if h.layers for bound in (h.layers.first, h.layers.last + 1)}
    if layers is None:
        return sorted({0} | bounds)
    return sorted({layers.first} | {bound for bound in bounds if bound in layers})


def _may_serve(peer: Peer, layer: int) -> bool:
    return peer.layers is None or layer in peer.layers


@lru_cache(maxsize=1024)  # asked for every pad that is drawn
def _plain(name: str) -> str:
    """What is left of a name when case, spacing, invisible characters and Unicode's ways to write it do not count."""
    spaced = " ".join(unicodedata.normalize("NFKC", name).split())
    visible = "".join(c for c in spaced if unicodedata.category(c) not in ("Cc", "Cf") and c not in _INVISIBLE)
    return unicodedata.normalize("NFKC", " ".join(visible.split()).casefold())


def _plain_host(host: str) -> str:
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
