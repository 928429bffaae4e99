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
certificate = "keys/alpha.pem"   # pinned: nothing else is accepted
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from cryptography.hazmat.primitives.serialization import Encoding

from symbiosis_priv.certificates import Kind, fingerprint, kind_of, load_certificates
from symbiosis_priv.errors import ConfigError, RoleConflictError
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS
from symbiosis_priv.wire import Role

T = TypeVar("T")
_PORT_DIGITS = 5
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


class _File(_Section, frozen=True):
    model: _Model
    tenant: _Tenant
    provider: Annotated[list[_Provider], msgspec.Meta(min_length=1)]


@dataclass(frozen=True)
class Peer:
    """One provider in one role, as the tenant pinned it."""

    name: str
    operator: str
    role: Role
    host: str
    port: int
    certificate: Path

    @property
    def fingerprint(self) -> str:
        """Of the pinned certificate."""
        return fingerprint(self.certificate)

    @property
    def fingerprints(self) -> frozenset[str]:
        """Of every provider's certificate in the pinned file: two during a rotation."""
        pinned = (c for c in load_certificates(self.certificate) if kind_of(c) is Kind.PROVIDER)
        return frozenset(fingerprint(c.public_bytes(Encoding.DER)) for c in pinned)


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
        ConfigError: unreadable, an unknown or missing key, no executor, a name used twice.
        RoleConflictError: an operator or a certificate is both executor and helper.
        CertificateError: a pinned certificate cannot be read.
    """
    path = Path(path)
    file = load_toml(path, _File)
    peers = []
    for entry in file.provider:
        try:
            host, port = parse_address(entry.address)
        except ConfigError as error:
            raise ConfigError(f"{path}, provider {entry.name!r}: {error}") from error
        peers.append(Peer(entry.name, entry.operator, entry.role, host, port, entry.certificate))
    federation = Federation(
        model_digest=file.model.digest,
        weight_bits=file.model.weight_bits,
        tenant_certificate=file.tenant.certificate,
        tenant_key=file.tenant.key,
        peers=tuple(peers),
    )
    if not federation.executors:
        raise ConfigError(f"{path}: no [[provider]] has role = 'executor'")
    if len({p.name for p in peers}) != len(peers):
        raise ConfigError(f"{path}: two providers share a name")
    check_roles(federation.executors, federation.helpers)
    return federation


def check_roles(executors: Sequence[Peer], helpers: Sequence[Peer]) -> None:
    """Rule 8: whoever knows a pad's seed never sees a row masked with it. Operators, certificates and addresses differ.

    Raises:
        RoleConflictError: an executor and a helper share one of them.
        CertificateError: a pinned certificate cannot be read.
    """
    for executor in executors:
        for helper in helpers:
            same = {
                "operator": _plain(executor.operator) == _plain(helper.operator),
                "certificate": not executor.fingerprints.isdisjoint(helper.fingerprints),
                "address": (_plain(executor.host), executor.port) == (_plain(helper.host), helper.port),
            }
            shared = [what for what, is_same in same.items() if is_same]
            if shared:
                raise RoleConflictError(
                    f"executor {executor.name!r} and helper {helper.name!r} have the same {', '.join(shared)}: "
                    f"together they would see everything. Choose a helper that somebody else runs, "
                    f"or masking = 'local'."
                )


def _plain(name: str) -> str:
    """What is left of a name when case and spacing do not count."""
    return " ".join(name.split()).casefold()
