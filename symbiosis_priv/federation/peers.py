"""Dataclasses for the providers, companies and registries of a federation file."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symbiosis_priv.certificates.reading import Pin, key_fingerprint, load_pin
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.limits import Role

if TYPE_CHECKING:
    from symbiosis_priv.network.dial import ClientConnection


@dataclass(frozen=True)
class Peer:
    """One provider in one role, as the tenant pinned it.

    Args:
        certificate: the pinned certificate: a file that holds nothing else, or the certificate itself for an executor
            that a registry listed.
        next_certificate: file of the pinned successor while the provider rotates.
        layers: layers that it must serve at least; None if the file does not say.
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
        """Hash of role and name only: every request looks peers up several times, and hashing all fields is slow."""
        return hash((self.role, self.name))

    @property
    def pins(self) -> tuple[Pin, ...]:
        """The pinned certificates: two during a rotation."""
        return (self.certificate,) if self.next_certificate is None else (self.certificate, self.next_certificate)

    @property
    def label(self) -> str:
        """Role, name and address, for messages."""
        return f"{self.role} {self.name!r} at {self.host}:{self.port}"

    def connection(self, context: ssl.SSLContext, **options: Any) -> "ClientConnection":
        """A connection to this peer, which is not open yet. `context` is a `tls.client_context` for `pins`; `options`
        are `traffic` and `waiting` of `ClientConnection`."""
        from symbiosis_priv.network.dial import ClientConnection  # importing torch would delay --help

        options |= {"provider": self.name, "host": self.host, "port": self.port, "pins": self.pins}
        options |= {"remote_only": self.remote_only, "context": context}
        return ClientConnection(self.label, **options)

    @property
    def key_fingerprint(self) -> str:
        """Fingerprint of the public key in `certificate`. Name and key together identify a party (rule 11)."""
        return key_fingerprint(load_pin(self.certificate))


@dataclass(frozen=True)
class Company:
    """Providers that count as one party although their operators have different names. The providers of `operators` may
    be in the file or come from registries. The company's own name is an operator too."""

    name: str
    members: tuple[str, ...]
    operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class Registries:
    """The registries that list more executors, and the authority that signs these executors' certificates.

    Args:
        addresses: `host:port` of registries; all of them are asked.
        authority: file with the authority's certificate, or several while one replaces another.
        revoked: list of revoked certificates; None revokes nothing.
    """

    addresses: tuple[str, ...]
    authority: Path
    revoked: Path | None = None
