"""Credentials of a provider: its certificate, its tenants' authorities, its helpers, and the list of revoked
certificates."""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Self

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from provider.config.schema import TlsConfig
from provider.refusal import Refusal
from symbiosis_priv.certificates import reading
from symbiosis_priv.certificates.reading import fingerprint, key_fingerprint, load_certificates
from symbiosis_priv.certificates.revocation import load_revoked, mark_of
from symbiosis_priv.errors import CertificateError
from symbiosis_priv.network.tls import TenantIdentity, server_context, tenant_identity
from symbiosis_priv.network.wire import ErrorCode


class HelperIdentity(msgspec.Struct, frozen=True):
    """A helper whose blocks the operator accepts."""

    fingerprint: str

    def __str__(self) -> str:
        return f"helper@{self.fingerprint[: reading.SHOWN]}"


Party = TenantIdentity | HelperIdentity


@dataclass(frozen=True)
class AuthenticatedPeer:
    """The client of a connection, as its certificate identifies it. `mark` identifies the certificate in a revocation
    list."""

    party: Party
    mark: str
    not_after: datetime
    key: PublicKeyTypes


@dataclass(frozen=True)
class Credentials:
    """The contents of the certificate files at the time they were read."""

    context: ssl.SSLContext  # for new connections
    # `key_fingerprint` of each accepted authority, with the expiry of its last certificate
    authorities: Mapping[str, datetime]
    revoked: frozenset[str]  # marks
    helpers: frozenset[str] = frozenset()  # `fingerprint` of the certificates from which blocks are accepted
    fingerprint: str = ""  # of the provider's own certificate

    @classmethod
    def load(cls, config: TlsConfig, *, helpers: Sequence[Path] = (), before: Self | None = None) -> Self:
        """Read the files. Blocks are accepted from `helpers`. The certificates that were revoked in `before`, the
        credentials that are replaced, stay revoked. Raises `CertificateError` if a file cannot be used."""
        context = server_context(
            certificate=config.certificate, key=config.key, tenant_authority=config.tenant_authority, helpers=helpers
        )
        authorities: dict[str, datetime] = {}
        for certificate in sorted(load_certificates(config.tenant_authority), key=lambda c: c.not_valid_after_utc):
            authorities[key_fingerprint(certificate)] = certificate.not_valid_after_utc
        return cls(
            context,
            authorities=authorities,
            revoked=load_revoked(config.revoked, known=frozenset() if before is None else before.revoked),
            helpers=frozenset(map(fingerprint, helpers)),
            fingerprint=fingerprint(config.certificate),
        )

    def revoking(self, path: Path | None) -> Self:
        """The same credentials with the certificates that a list revokes besides. Raises `CertificateError` if the list
        cannot be used."""
        return replace(self, revoked=load_revoked(path, known=self.revoked))

    def identify(self, connection: ssl.SSLObject) -> AuthenticatedPeer:
        """The client of a connection whose handshake has ended. Raises `CertificateError` if its certificate is neither
        a tenant's nor a helper's."""
        shown = connection.getpeercert(binary_form=True)
        if shown is None:
            raise CertificateError("the client showed no certificate: sign its request with `symbiosis-priv keys sign`")
        certificate = x509.load_der_x509_certificate(shown)
        own = fingerprint(shown)
        party = HelperIdentity(own) if own in self.helpers else tenant_identity(connection)
        return AuthenticatedPeer(party, mark_of(certificate), certificate.not_valid_after_utc, certificate.public_key())

    def accepts_until(self, peer: AuthenticatedPeer) -> datetime | None:
        """When the certificate of an authenticated client expires; None if it is not accepted any more."""
        if isinstance(peer.party, TenantIdentity):
            last = self.authorities.get(peer.party.authority)
        else:
            last = peer.not_after if peer.party.fingerprint in self.helpers else None
        return None if peer.mark in self.revoked or last is None else min(peer.not_after, last)

    def refusal(self, peer: AuthenticatedPeer) -> Refusal | None:
        """The reason to refuse an authenticated client now; None if its certificate is still accepted."""
        if (until := self.accepts_until(peer)) is None:
            return Refusal(ErrorCode.REVOKED, "this certificate is not accepted any more: ask the provider's operator")
        if reading.now() > until:
            return Refusal(ErrorCode.REVOKED, "this certificate has expired: renew it (`symbiosis-priv keys request`)")
        return None
