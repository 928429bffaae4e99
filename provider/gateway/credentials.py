"""Who the provider is and whom it lets in: its certificate, the authorities it knows, and what has been revoked."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from cryptography import x509

from provider.config.schema import TlsConfig
from provider.refusal import Refusal
from symbiosis_priv.certificates import clock, key_fingerprint, load_certificates
from symbiosis_priv.certificates.revocation import load_revoked, mark_of
from symbiosis_priv.errors import CertificateError
from symbiosis_priv.network.tls import TenantIdentity, server_context, tenant_identity
from symbiosis_priv.network.wire import ErrorCode


@dataclass(frozen=True)
class Peer:
    """What a tenant has shown of itself.

    Args:
        tenant: its name and authority.
        mark: names its certificate in a revocation list.
        not_after: when its certificate expires.
    """

    tenant: TenantIdentity
    mark: str
    not_after: datetime

    @classmethod
    def of(cls, connection: ssl.SSLSocket) -> Self:
        """After the handshake. Raises `CertificateError` if this is no tenant."""
        tenant = tenant_identity(connection)
        shown = connection.getpeercert(binary_form=True)
        if shown is None:
            raise CertificateError("the client showed no certificate: sign its request with `symbiosis-priv keys sign`")
        certificate = x509.load_der_x509_certificate(shown)
        return cls(tenant, mark_of(certificate), certificate.not_valid_after_utc)


@dataclass(frozen=True)
class Credentials:
    """As the files were when they were read.

    Args:
        context: TLS for new connections.
        authorities: `key_fingerprint` of those whose tenants are let in, and when the last certificate of each expires.
        revoked: marks of certificates that are not.
    """

    context: ssl.SSLContext
    authorities: Mapping[str, datetime]
    revoked: frozenset[str]

    @classmethod
    def load(cls, config: TlsConfig, *, before: Credentials | None = None) -> Self:
        """Read the files. Raises `CertificateError` if one of them is not what it should be.

        Args:
            before: the ones that these are to replace. Who is revoked stays so, whatever the list says now.
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

    def refusal(self, peer: Peer) -> Refusal | None:
        """Why a tenant that has authenticated, perhaps long ago, would not be let in now; None if it would."""
        authority_not_after = self.authorities.get(peer.tenant.authority)
        if peer.mark in self.revoked or authority_not_after is None:
            return Refusal(ErrorCode.REVOKED, "this certificate is not accepted any more: ask the provider's operator")
        if clock.now() > min(peer.not_after, authority_not_after):
            return Refusal(ErrorCode.REVOKED, "this certificate has expired: renew it (`symbiosis-priv keys request`)")
        return None
