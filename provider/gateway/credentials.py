"""Credentials of a provider: its certificate, its tenants' authorities, and the list of revoked certificates."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from cryptography import x509

from provider.config.schema import TlsConfig
from provider.refusal import Refusal
from symbiosis_priv.certificates import clock
from symbiosis_priv.certificates.reading import key_fingerprint, load_certificates
from symbiosis_priv.certificates.revocation import load_revoked, mark_of
from symbiosis_priv.errors import CertificateError
from symbiosis_priv.network.tls import TenantIdentity, server_context, tenant_identity
from symbiosis_priv.network.wire import ErrorCode


@dataclass(frozen=True)
class AuthenticatedTenant:
    """A tenant, as its certificate identifies it.

    Args:
        tenant: name and authority of the tenant.
        mark: identifies the certificate in a revocation list.
        not_after: expiry of the certificate.
    """

    tenant: TenantIdentity
    mark: str
    not_after: datetime

    @classmethod
    def of(cls, connection: ssl.SSLObject) -> Self:
        """Read the certificate of a connection after its handshake. Raises `CertificateError` if it names no tenant."""
        tenant = tenant_identity(connection)
        shown = connection.getpeercert(binary_form=True)
        if shown is None:
            raise CertificateError("the client showed no certificate: sign its request with `symbiosis-priv keys sign`")
        certificate = x509.load_der_x509_certificate(shown)
        return cls(tenant, mark_of(certificate), certificate.not_valid_after_utc)


@dataclass(frozen=True)
class Credentials:
    """The contents of the certificate files at the time they were read.

    Args:
        context: TLS context for new connections.
        authorities: `key_fingerprint` of each accepted authority, with the expiry of the authority's last certificate.
        revoked: marks of revoked certificates.
    """

    context: ssl.SSLContext
    authorities: Mapping[str, datetime]
    revoked: frozenset[str]

    @classmethod
    def load(cls, config: TlsConfig, *, before: Self | None = None) -> Self:
        """Read the files. Raises `CertificateError` if a file cannot be used.

        Args:
            before: the credentials that are replaced. Their revoked certificates stay revoked.
        """
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

    def refusal(self, peer: AuthenticatedTenant) -> Refusal | None:
        """The reason to refuse an authenticated tenant now; None if its certificate is still accepted."""
        authority_not_after = self.authorities.get(peer.tenant.authority)
        if peer.mark in self.revoked or authority_not_after is None:
            return Refusal(ErrorCode.REVOKED, "this certificate is not accepted any more: ask the provider's operator")
        if clock.now() > min(peer.not_after, authority_not_after):
            return Refusal(ErrorCode.REVOKED, "this certificate has expired: renew it (`symbiosis-priv keys request`)")
        return None
