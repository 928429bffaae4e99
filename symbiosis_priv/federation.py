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

Rule 11: the parties of a federation are pairwise distinct in certificate, public key and address. Two helpers with one
key would otherwise be one party, and an executor listed twice would be asked again after its quarantine.
"""

from __future__ import annotations

import ipaddress
import itertools
import socket
import tomllib
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from cryptography.hazmat.primitives.serialization import Encoding

from symbiosis_priv.certificates import fingerprint, key_fingerprint, load_pin
from symbiosis_priv.errors import CertificateError, ConfigError, RoleConflictError
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS, Role

T = TypeVar("T")
_PORT_DIGITS = 5
_THIS_MACHINE = "127.0.0.1"
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


class _File(_Section, frozen=True):
    model: _Model
    tenant: _Tenant
    provider: Annotated[list[_Provider], msgspec.Meta(min_length=1)]


@dataclass(frozen=True)
class Peer:
    """One provider in one role, as the tenant pinned it.

    Args:
        certificate: file of the pinned certificate, and of nothing else.
        next_certificate: the same for its successor while the provider rotates.
    """

    name: str
    operator: str
    role: Role
    host: str
    port: int
    certificate: Path
    next_certificate: Path | None = None

    @property
    def pins(self) -> tuple[Path, ...]:
        """Files of the pinned certificates, one in each: two during a rotation."""
        return (self.certificate,) if self.next_certificate is None else (self.certificate, self.next_certificate)

    @property
    def key_fingerprint(self) -> str:
        """Of the public key in `certificate`. With the name it tells this party from every other one (rule 11)."""
        return key_fingerprint(load_pin(self.certificate))


@dataclass(frozen=True)
class Federation:
    """A parsed and checked `federation.toml`."""

    model_digest: str
    weight_bits: int
    tenant_certificate: Path
    tenant_key: Path
    peers: tuple[Peer, ...]

    @property
    def executors(self) -> tuple[Peer, ...]:
        """Providers that see masked rows."""
        return tuple(p for p in self.peers if p.role == "executor")

    @property
    def helpers(self) -> tuple[Peer, ...]:
        """Providers that see a seed and never a row."""
        return tuple(p for p in self.peers if p.role == "helper")


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
        RoleConflictError: one party, or one operator, is both executor and helper.
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
    )
    if not federation.executors:
        raise ConfigError(f"{path}: no [[provider]] has role = 'executor'")
    try:
        check_parties(peers)
    except (ConfigError, CertificateError) as error:
        raise type(error)(f"{path}: {error}") from error
    return federation


def _peer(entry: _Provider, path: Path) -> Peer:
    try:
        host, port = parse_address(entry.address)
    except ConfigError as error:
        raise ConfigError(f"{path}, provider {entry.name!r}: {error}") from error
    if not port:
        raise ConfigError(f"{path}, provider {entry.name!r}: nobody listens at port 0; ask its operator for the port")
    return Peer(entry.name, entry.operator, entry.role, host, port, entry.certificate, entry.next_certificate)


def check_parties(peers: Sequence[Peer]) -> None:
    """Rules 8 and 11: no two entries are one party, and no operator is both executor and helper.

    Names, operators and addresses are compared as they are meant, not as they are spelled; certificates and public keys
    by fingerprint, the next ones included.

    Raises:
        RoleConflictError: an executor and a helper have something in common.
        ConfigError: two of one role have.
        CertificateError: a pinned file cannot be read, or does not hold one provider's certificate.
    """
    parties = [(peer, _traits(peer)) for peer in peers]
    for (one, mine), (other, theirs) in itertools.combinations(parties, 2):
        shared = [what for what in mine if not mine[what].isdisjoint(theirs[what])]
        if one.role == other.role and "operator" in shared:
            shared.remove("operator")
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


def _traits(peer: Peer) -> dict[str, frozenset[object]]:
    """What must tell a party from others, each in one spelling."""
    pinned = [load_pin(path) for path in peer.pins]
    return {
        "operator": frozenset({_plain(peer.operator)}),
        "name": frozenset({_plain(peer.name)}),
        "certificate": frozenset(fingerprint(c.public_bytes(Encoding.DER)) for c in pinned),
        "public key": frozenset(map(key_fingerprint, pinned)),
        "address": frozenset({(_plain_host(peer.host), peer.port)}),
    }


def _plain(name: str) -> str:
    """What is left of a name when case, spacing, invisible characters and Unicode's ways to write it do not count."""
    visible = "".join(c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) != "Cf")
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
