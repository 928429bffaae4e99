"""Who the provider is and whom it lets in: its certificate, the authorities it knows, and what has been revoked."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Self

from cryptography import x509

from provider.config.schema import TlsConfig
from symbiosis_priv.certificates import key_fingerprint, load_certificates
from symbiosis_priv.certificates.revocation import load_revoked, mark_of
from symbiosis_priv.errors import CertificateError
from symbiosis_priv.network.tls import TenantIdentity, server_context, tenant_identity


@dataclass(frozen=True)
class Peer:
    """A tenant's connection: who it is, and by which mark a list would revoke the certificate that it has shown."""

    tenant: TenantIdentity
    mark: str

    @classmethod
    def of(cls, connection: ssl.SSLSocket) -> Self:
        """After the handshake. Raises `CertificateError` if this is no tenant."""
        tenant = tenant_identity(connection)
        shown = connection.getpeercert(binary_form=True)
        if shown is None:
            raise CertificateError("the client showed no certificate: sign its request with `symbiosis-priv keys sign`")
        return cls(tenant, mark_of(x509.load_der_x509_certificate(shown)))


@dataclass(frozen=True)
class Credentials:
    """As the files were when they were read.

    Args:
        context: TLS for new connections.
        authorities: `key_fingerprint` of those whose tenants are let in.
        revoked: marks of certificates that are not.
    """

    context: ssl.SSLContext
    authorities: frozenset[str]
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
        return cls(
            context,
            authorities=frozenset(map(key_fingerprint, load_certificates(config.tenant_authority))),
            revoked=load_revoked(config.revoked, known=frozenset() if before is None else before.revoked),
        )

    def accepts(self, peer: Peer) -> bool:
        """Whether somebody who has authenticated, perhaps long ago, would still be let in."""
        return peer.mark not in self.revoked and peer.tenant.authority in self.authorities
