"""Whom a tenant has pinned, and in which roles; who vouches for others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from symbiosis_priv.certificates import Pin, key_fingerprint, load_pin
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.limits import Role


@dataclass(frozen=True)
class Peer:
    """One provider in one role, as the tenant pinned it.

    Args:
        certificate: the pinned one: a file with it and nothing else, or itself, of an executor that was discovered.
        next_certificate: the same for its successor while the provider rotates.
        layers: what it must serve at least; None if what it says itself is all that is known.
        remote_only: its host may not resolve to an address of this machine, of its link or of a metadata service. True
            for executors that a registry listed, unless the federation is local.
    """

    name: str
    operator: str
    role: Role
    host: str
    port: int
    certificate: Pin
    next_certificate: Path | None = None
    layers: LayerRange | None = None
    remote_only: bool = False

    def __hash__(self) -> int:
        """Of what few have in common: every request asks several times whether a peer is among some."""
        return hash((self.role, self.name))

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
        revoked: list of certificates that it does not vouch for any more.
    """

    addresses: tuple[str, ...]
    authority: Path
    revoked: Path | None = None
