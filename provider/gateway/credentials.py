"""Credentials of a provider: its certificate, its tenants' authorities, and the list of revoked certificates."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Self

from cryptography import x509

from provider.config.schema import TlsConfig
from provider.refusal import Refusal
from symbiosis_priv.certificates import reading
from symbiosis_priv.certificates.reading import key_fingerprint, load_certificates
from symbiosis_priv.certificates.revocation import load_revoked, mark_of
from symbiosis_priv.errors import CertificateError
from symbiosis_priv.network.tls import TenantIdentity, server_context, tenant_identity
from symbiosis_priv.network.wire import ErrorCode


@dataclass(frozen=True)
class AuthenticatedPeer:
    """The tenant of a connection, as its certificate identifies it. `mark` identifies the certificate in a revocation
    list."""

    tenant: TenantIdentity
    mark: str
    not_after: datetime


@dataclass(frozen=True)
class Credentials:
    """The contents of the certificate files at the time they were read."""

    context: ssl.SSLContext  # for new connections
    # `key_fingerprint` of each accepted authority, with the expiry of its last certificate
    authorities: Mapping[str, datetime]
    revoked: frozenset[str]  # marks

    @classmethod
    def load(cls, config: TlsConfig, *, before: Self | None = None) -> Self:
        """Read the files. The certificates that were revoked in `before`, the credentials that are replaced, stay
        revoked. Raises `CertificateError` if a file cannot be used."""
        context = server_context(
            certificate=config.certificate, key=config.key, tenant_authority=config.tenant_authority
        )
        authorities: dict[str, datetime] = {}
        for certificate in sorted(load_certificates(config.tenant_authority), key=lambda c: c.not_valid_after_utc):
            authorities[key_fingerprint(certificate)] = certificate.not_valid_after_utc
        return cls(
            context,
            authorities=authorities,
            revoked=load_revoked(config.revoked, known=frozenset() if before is None else before.revoked),
        )

    def revoking(self, path: Path | None) -> Self:
        """The same credentials with the certificates that a list revokes besides. Raises `CertificateError` if the list
        cannot be used."""
        return replace(self, revoked=load_revoked(path, known=self.revoked))

    def identify(self, connection: ssl.SSLObject) -> AuthenticatedPeer:
        """The tenant of a connection whose handshake has ended. Raises `CertificateError` if its certificate is not a
        tenant's."""
        shown = connection.getpeercert(binary_form=True)
        if shown is None:
            raise CertificateError("the client showed no certificate: sign its request with `symbiosis-priv keys sign`")
        certificate = x509.load_der_x509_certificate(shown)
        tenant = tenant_identity(connection)
        return AuthenticatedPeer(tenant, mark_of(certificate), certificate.not_valid_after_utc)

    def refusal(self, peer: AuthenticatedPeer) -> Refusal | None:
        """The reason to refuse an authenticated client now; None if its certificate is still accepted."""
        last = self.authorities.get(peer.tenant.authority)
        if peer.mark in self.revoked or last is None:
            return Refusal(ErrorCode.REVOKED, "this certificate is not accepted any more: ask the provider's operator")
        if reading.now() > min(peer.not_after, last):
            return Refusal(ErrorCode.REVOKED, "this certificate has expired: renew it (`symbiosis-priv keys request`)")
        return None
