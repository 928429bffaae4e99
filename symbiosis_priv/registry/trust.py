"""The authorities that sign the certificates of a federation's providers and registries, and the revoked
certificates."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from cryptography import x509

from symbiosis_priv.certificates.reading import is_authority, is_issued_by, load_certificates, provider_name
from symbiosis_priv.certificates.revocation import load_revoked, mark_of
from symbiosis_priv.errors import CertificateError, DescriptorError


@dataclass(frozen=True)
class Trust:
    """The authorities of a federation, and the certificates that were revoked.

    Args:
        authorities: CA certificates; several while one replaces another.
        revoked: marks of revoked certificates, see `revocation`.
    """

    authorities: tuple[x509.Certificate, ...]
    revoked: frozenset[str] = frozenset()

    @classmethod
    def load(cls, authority: Path, revoked: Path | None = None, *, known: frozenset[str] = frozenset()) -> Self:
        """Read a PEM file of CA certificates and a list that `symbiosis-priv keys revoke` has written. The certificates
        whose marks are in `known` stay revoked. Raises `CertificateError` if a file cannot be read, or `authority`
        holds no CA certificate."""
        found = tuple(certificate for certificate in load_certificates(authority) if is_authority(certificate))
        if not found:
            raise CertificateError(
                f"{authority} holds no CA certificate: the operator of the federation makes one with `symbiosis-priv "
                f"keys authority --name federation`, and gives its certificate to all members"
            )
        return cls(found, load_revoked(revoked, known=known))

    def check(self, certificate: x509.Certificate, *, at: datetime) -> None:
        """Check that an authority has issued a provider's certificate, that both were valid at a time, and that the
        certificate was not revoked. Raises `DescriptorError`."""
        issuers = [authority for authority in self.authorities if is_issued_by(certificate, authority)]
        if not issuers:
            raise DescriptorError("its certificate is not one that the federation's authority has issued")
        if provider_name(certificate) is None:
            raise DescriptorError("its certificate is not a provider's")
        if not any(_is_valid(c, at) for c in issuers) or not _is_valid(certificate, at):
            raise DescriptorError("its certificate, or the authority's, is not valid then")
        if mark_of(certificate) in self.revoked:
            raise DescriptorError("its certificate has been revoked")


def _is_valid(certificate: x509.Certificate, at: datetime) -> bool:
    return certificate.not_valid_before_utc <= at <= certificate.not_valid_after_utc
