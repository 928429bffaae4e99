"""`federation.toml`: which providers a tenant uses, in which roles, and which model they must serve. The file
examples/federation.toml explains every key.

`parties` checks rule 11, and `check_choice` checks rule 8: which executor may receive rows under which pads.

A company that knows a pad's seed never sees a row masked with that pad. All providers of one company may know
what each of them knows. Without `[pads]`, all helpers share every pad, so a company with both roles is refused. With
`helpers = k`, the tenant chooses for each executor k helpers of k different companies, none of them the executor's. A
file that leaves no such choice is refused.
"""

import re
import ssl
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec

from symbiosis_priv.checkpoints.layers import DEFAULT_SCOPE, LayerRange, RoundTrips, Scope
from symbiosis_priv.errors import CertificateError, ConfigError, RoleConflictError
from symbiosis_priv.federation.parties import (
    Company,
    Name,
    Parties,
    Peer,
    Registries,
    check_parties,
    check_spelling,
    is_this_machine,
    plain,
    plain_host,
)
from symbiosis_priv.limits import DEFAULT_RING_BITS, DEFAULT_WEIGHT_BITS, RingBits, Role, WeightBits
from symbiosis_priv.network.addresses import Address, parse_address, shown
from symbiosis_priv.network.tls import client_context
from symbiosis_priv.system.toml import load_toml, toml_table


@dataclass(frozen=True)
class Federation:
    """A parsed and checked `federation.toml`, whose form the module shows."""

    model_digest: str
    weight_bits: int
    tenant_certificate: Path
    tenant_key: Path
    peers: tuple[Peer, ...]
    companies: tuple[Company, ...] = ()
    pad_helpers: int | None = None  # number of helpers that share each pad; the others are spares. None: all share it
    registries: Registries | None = None  # they list more executors than the file
    scope: Scope = DEFAULT_SCOPE  # the optional layer groups that the providers serve
    ring_bits: RingBits = DEFAULT_RING_BITS

    @property
    def executors(self) -> tuple[Peer, ...]:
        """The executors of the file. Executors that a registry lists are not included."""
        return tuple(p for p in self.peers if p.role == "executor")

    @property
    def helpers(self) -> tuple[Peer, ...]:
        """The helpers of the file: a helper sees seeds and never a row."""
        return tuple(p for p in self.peers if p.role == "helper")

    def tls_context(self, peer: Peer) -> ssl.SSLContext:
        """The tenant's context for connections to a provider. Raises `CertificateError`; see `tls.client_context`."""
        return client_context(certificate=self.tenant_certificate, key=self.tenant_key, pins=peer.pins)

    @property
    def local(self) -> bool:
        """True if every provider and every registry of the file is on this machine."""
        hosts = [host for peer in self.peers for host, _ in peer.addresses]
        if self.registries is not None:
            hosts += [parse_address(address)[0] for address in self.registries.addresses]
        return all(is_this_machine(host) for host in hosts)

    def one_company(self, one: Peer, other: Peer) -> bool:
        """Returns True if one peer may know what the other one knows: they have the same operator or name, or a chain
        of companies and operators connects them. Works for peers that are not in the file, too."""
        return self._parties.same(one, other)

    def company_of(self, operator: str) -> Hashable:
        """Return a value that is equal for operators of one company."""
        return self._parties.company_of(operator)

    def admissible(self, executor: Peer, holders: Collection[Peer]) -> bool:
        """Rule 8: returns True if no company of `holders`, which know a pad's seed, is the company of `executor`."""
        return not any(self.one_company(executor, holder) for holder in holders)

    def companies_of(self, peers: Collection[Peer]) -> int:
        """Number of different companies among these peers."""
        parties = Parties([*self.peers, *peers], self.companies)
        return len({parties.roots(peer) for peer in peers})

    @cached_property
    def _parties(self) -> Parties:
        return Parties(self.peers, self.companies)


def check_choice(federation: Federation) -> None:
    """Checks that every executor has enough helpers of other companies at each of its layers, if the file has `[pads]`.
    Raises `ConfigError`: too few helpers for `[pads] helpers`; `RoleConflictError`: of too few companies."""
    k = federation.pad_helpers
    if k is None:
        return
    helpers = federation.helpers
    if k > len(helpers):
        raise ConfigError(
            f"[pads] helpers = {k}, and {len(helpers)} [[provider]] have role = 'helper': add helpers, or lower it"
        )
    if not federation.executors and (companies := federation.companies_of(helpers)) < k:  # a registry lists executors
        raise RoleConflictError(
            f"[pads] helpers = {k} needs helpers of {k} different companies for each pad, but the helpers of this file "
            f"belong to {companies}: add helpers of other companies, or lower it"
        )
    for executor in federation.executors:
        others = [helper for helper in helpers if federation.admissible(executor, [helper])]
        # the layers at which the set of serving helpers may change
        changes = {bound for h in helpers if h.layers for bound in (h.layers.first, h.layers.last + 1)}
        if executor.layers is None:
            changes.add(0)
        else:
            changes = {executor.layers.first} | {layer for layer in changes if layer in executor.layers}
        found = {
            layer: federation.companies_of([h for h in others if h.layers is None or layer in h.layers])
            for layer in sorted(changes)
        }
        short = {layer: companies for layer, companies in found.items() if companies < k}
        # The layers of an executor may be unknown. Then the check requires enough helpers at one layer at least.
        if short and (executor.layers is not None or len(short) == len(found)):
            layer, companies = next(iter(short.items()))
            where = f" at layer {layer}" if any(helper.layers for helper in helpers) else ""
            raise RoleConflictError(
                f"executor {executor.name!r} has helpers of {companies} companies other than its own{where}, but "
                f"[pads] helpers = {k} needs {k} different companies for each pad: add helpers of other companies, or "
                f"lower it"
            )


_MOST_ADDRESSES = 64  # of one provider
_DIGEST = re.compile("sha256:[0-9a-f]{64}")


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Model(_Section, frozen=True):
    digest: str
    weight_bits: WeightBits = DEFAULT_WEIGHT_BITS
    tied_head: bool = False
    experts: bool = True
    round_trips: RoundTrips = 4
    ring_bits: RingBits = DEFAULT_RING_BITS

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError(
                f"digest = {self.digest!r} is not sha256: and 64 hexadecimal digits; `symbiosis-priv federation init "
                f"--model MODEL` writes the digest of your own copy"
            )


class _Tenant(_Section, frozen=True):
    certificate: Path
    key: Path


class _Provider(_Section, frozen=True):
    name: Name
    operator: Name
    role: Role
    address: str | Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=_MOST_ADDRESSES)]
    certificate: Path
    next_certificate: Path | None = None
    layers: str | None = None


class _Pads(_Section, frozen=True):
    helpers: Annotated[int, msgspec.Meta(ge=1)]


class FederationFile(_Section, frozen=True):
    """The tables of the file."""

    model: _Model
    tenant: _Tenant
    provider: Annotated[list[_Provider], msgspec.Meta(min_length=1)]
    pads: _Pads | None = None
    company: tuple[Company, ...] = ()
    registry: Registries | None = None


def load_federation(path: str | Path) -> Federation:
    """Read and check a federation file. Raises `ConfigError`: the file is unreadable, has an unknown or missing key or
    no executor, or two entries are one party; `RoleConflictError`: one party or one company is both executor and
    helper; or, with `[pads]`, an executor has too few helpers of other companies; `CertificateError`: a pinned file
    cannot be read, or does not hold one provider's certificate."""
    path = Path(path)
    file = load_toml(path, FederationFile, made_by="symbiosis-priv federation init")
    peers = []
    for entry in file.provider:
        with _named(f"{path}, provider {entry.name!r}"):
            layers = None if entry.layers is None else LayerRange.parse(entry.layers)
            files = entry.certificate, entry.next_certificate
            first, *others = _addresses(entry.address)
            peers.append(Peer(entry.name, entry.operator, entry.role, *first, *files, layers, others=tuple(others)))
    with _named(f"{path}, [registry]"):
        for address in file.registry.addresses if file.registry else ():
            _address(address)
    federation = Federation(
        model_digest=file.model.digest,
        weight_bits=file.model.weight_bits,
        ring_bits=file.model.ring_bits,
        tenant_certificate=file.tenant.certificate,
        tenant_key=file.tenant.key,
        peers=tuple(peers),
        companies=file.company,
        pad_helpers=file.pads.helpers if file.pads else None,
        registries=file.registry,
        scope=Scope(tied_head=file.model.tied_head, experts=file.model.experts, round_trips=file.model.round_trips),
    )
    if not federation.executors and federation.registries is None:
        raise ConfigError(f"{path}: no [[provider]] has role = 'executor', and there is no [registry] to find one in")
    with _named(path):
        names = [name for peer in peers for name in (peer.name, peer.operator)]
        names += [name for c in federation.companies for name in (c.name, *c.members, *c.operators)]
        for name in names:
            check_spelling(name)
        _check_companies(federation)
        check_parties(peers, companies=federation.companies, pad_helpers=federation.pad_helpers)
        check_choice(federation)
    return federation


@contextmanager
def _named(place: object) -> Iterator[None]:
    """Errors in this block begin with the place where the file is wrong."""
    try:
        yield
    except (ConfigError, CertificateError) as error:
        raise type(error)(f"{place}: {error}") from error


def _addresses(text: str | Sequence[str]) -> list[Address]:
    found = [_address(one) for one in ([text] if isinstance(text, str) else text)]
    counted = Counter((plain_host(host), port) for host, port in found)
    if twice := [shown(host, port) for host, port in found if counted[plain_host(host), port] > 1]:
        raise ConfigError(f"address lists {twice[0]!r} twice: remove one of them")
    return found


def _address(text: str) -> Address:
    host, port = parse_address(text)
    if not port:
        raise ConfigError(f"port 0 is not valid; ask the operator of {text!r} for the port")
    return host, port


def _check_companies(federation: Federation) -> None:
    listed = {plain(peer.name) for peer in federation.peers}
    for company in federation.companies:
        if unknown := [name for name in company.members if plain(name) not in listed]:
            known = ", ".join(repr(peer.name) for peer in federation.peers)
            raise ConfigError(
                f"company {company.name!r}: no [[provider]] is called {unknown[0]!r}; there are {known}. "
                f"List an operator without a [[provider]] under operators = [...]"
            )
        if len(set(map(plain, company.members))) + len(set(map(plain, company.operators))) < 2:  # it would join nobody
            raise ConfigError(
                f"company {company.name!r} has fewer than two members: list two or more, or remove this [[company]]"
            )


def federation_text(
    providers: Iterable[Mapping[str, object]],
    *,
    digest: str,
    certificate: Path | str,
    key: Path | str,
    weight_bits: int = DEFAULT_WEIGHT_BITS,
    scope: Scope = DEFAULT_SCOPE,
    pads: Mapping[str, object] | None = None,
    companies: Mapping[str, Sequence[str]] | None = None,
    registry: Mapping[str, object] | None = None,
) -> str:
    """Return the text of a `federation.toml`, which only `load_federation` checks. `certificate` and `key` are the
    tenant's; `companies` has names of providers by the name of their company."""
    tables = [
        toml_table("[model]", digest=digest, weight_bits=weight_bits, **asdict(scope)),
        toml_table("[tenant]", certificate=certificate, key=key),
    ]
    if pads:
        tables.append(toml_table("[pads]", **pads))
    tables += [toml_table("[[company]]", name=name, members=members) for name, members in (companies or {}).items()]
    if registry:
        tables.append(toml_table("[registry]", **registry))
    return "\n".join([*tables, *(toml_table("[[provider]]", **entries) for entries in providers)])
