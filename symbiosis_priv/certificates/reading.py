"""Reads certificates and keys: kind, names, validity and fingerprints. Signs and verifies with the keys.

Logs warnings, each once, about key files that other users can read and certificates that expire soon.
"""

import hashlib
import logging
import os
import re
import shlex
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from symbiosis_priv.certificates.naming import NAME, PROJECT, TENANT_URN, is_operator
from symbiosis_priv.certificates.pem import read_file
from symbiosis_priv.errors import CertificateError

Pin = Path | x509.Certificate
"""The only certificate of a provider that is accepted: a file that holds it alone, or one from a registry."""

log = logging.getLogger(__name__)
_warned: set[str] = set()
SHOWN: Final = len("sha256:") + 16
"""Characters of a fingerprint in logs, quotas and lists."""
SOON: Final = timedelta(days=14)
"""Certificates that expire within this time are warned about."""
_ECDSA: Final = ec.ECDSA(hashes.SHA256())
_BEGIN = re.compile(rb"-----BEGIN (?:X509 )?CERTIFICATE-----")
_Extension = TypeVar("_Extension", bound=x509.ExtensionType)


class Kind(StrEnum):
    PROVIDER = "provider"
    TENANT = "tenant"


@dataclass(frozen=True)
class Identity:
    """A certificate and its private key, as two PEM files. The key is read only when it is needed."""

    certificate: Path
    key: Path

    def private_key(self) -> PrivateKeyTypes:
        """Reads the key file. Raises `CertificateError` if it is missing, encrypted or not a key."""
        try:
            return serialization.load_pem_private_key(read_file(self.key), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise CertificateError(
                f"{self.key} is not an unencrypted PEM private key: restore it, or make one with `symbiosis-priv keys`"
            ) from error


def now() -> datetime:
    """The current time, in one place, so that tests can replace it."""
    return datetime.now(UTC)


def pair(directory: Path, name: str) -> Identity:
    return Identity(certificate=directory / f"{name}.pem", key=directory / f"{name}.key")


def load_certificates(path: Path) -> list[x509.Certificate]:
    """The certificates of a PEM file. Raises `CertificateError`: it cannot be read, has none, or ends within one."""
    data = read_file(path)
    try:
        found = _certificates_of(data)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise CertificateError(
            f"{path} holds no PEM certificate: expected a file made by `symbiosis-priv keys`"
        ) from error
    last = data.rstrip().rpartition(b"\n")[2]
    if len(_BEGIN.findall(data)) != len(found) or (last.startswith(b"-") and not last.startswith(b"-----END ")):
        raise CertificateError(f"{path} ends in the middle of a certificate: copy it again")
    return list(found)


@lru_cache(maxsize=256)  # a connection needs the certificates of the same few files several times
def _certificates_of(data: bytes) -> tuple[x509.Certificate, ...]:
    found = x509.load_pem_x509_certificates(data)
    for certificate in found:  # cryptography parses these fields at first use: malformed ones must raise here
        _ = certificate.subject, certificate.issuer, certificate.public_key()
    return tuple(found)


def load_pin(pin: Pin) -> x509.Certificate:
    """A provider's pinned certificate. Raises `CertificateError` unless `pin` holds one provider certificate."""
    certificates = load_certificates(pin) if isinstance(pin, Path) else [pin]
    if len(certificates) > 1:
        raise CertificateError(
            f"{pin} holds {len(certificates)} certificates, and a pinned file holds one: keep the provider's own. "
            f"While it rotates, name the file of its new one as next_certificate"
        )
    if kind_of(certificates[0]) is not Kind.PROVIDER:
        raise CertificateError(f"{pin} is not a provider certificate: pin the one that its operator gave you")
    return certificates[0]


def fingerprint(certificate: Pin | bytes) -> str:
    """`sha256:<hex>` of the DER encoding of a certificate, of the first certificate in a PEM file, or of DER bytes."""
    if isinstance(certificate, Path):
        certificate = load_certificates(certificate)[0]
    if isinstance(certificate, x509.Certificate):
        certificate = certificate.public_bytes(serialization.Encoding.DER)
    return f"sha256:{hashlib.sha256(certificate).hexdigest()}"


def key_fingerprint(certificate: x509.Certificate | x509.CertificateSigningRequest) -> str:
    """`sha256:<hex>` of the public key (its SubjectPublicKeyInfo): the same in every certificate for that key."""
    spki = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return f"sha256:{hashlib.sha256(spki).hexdigest()}"


def kind_of(certificate: x509.Certificate) -> Kind | None:
    """The kind of a certificate; None if it is neither a provider's nor a tenant's."""
    if tenant_name(certificate) is not None:
        return Kind.TENANT
    is_server = ExtendedKeyUsageOID.SERVER_AUTH in usages(certificate) and not is_authority(certificate)
    return Kind.PROVIDER if is_server and hosts_of(certificate) else None


def tenant_name(certificate: x509.Certificate) -> str | None:
    """The tenant's name in a certificate; None unless it is a tenant's. The caller must verify the signature."""
    if is_authority(certificate) or ExtendedKeyUsageOID.CLIENT_AUTH not in usages(certificate):
        return None
    names = alternative_names(certificate)
    uris = [name.value for name in names if isinstance(name, x509.UniformResourceIdentifier)]
    if len(uris) != 1 or not uris[0].startswith(TENANT_URN):
        return None
    name = uris[0].removeprefix(TENANT_URN)
    return name if NAME.fullmatch(name) else None


def provider_name(certificate: x509.Certificate) -> str | None:
    """The provider's name in a certificate; None unless it is a provider's. The caller must verify the signature."""
    name = sole_attribute(certificate.subject, NameOID.COMMON_NAME)
    return name if name and NAME.fullmatch(name) and kind_of(certificate) is Kind.PROVIDER else None


def operator_of(certificate: x509.Certificate) -> str | None:
    """The operator's name in a provider's certificate; None if there is none. The caller must verify the signature."""
    operator = sole_attribute(certificate.subject, NameOID.ORGANIZATION_NAME)
    if operator is None or operator.casefold() == PROJECT or not is_operator(operator):
        return None
    return operator if kind_of(certificate) is Kind.PROVIDER else None


def sole_attribute(name: x509.Name, kind: x509.ObjectIdentifier) -> str | None:
    """The value of an attribute that occurs once; None if it is absent or occurs several times."""
    values = [str(attribute.value) for attribute in name.get_attributes_for_oid(kind)]
    return values[0] if len(values) == 1 else None


def is_authority(certificate: x509.Certificate) -> bool:
    constraints = _extension(certificate, x509.BasicConstraints)
    return constraints is not None and constraints.ca


def is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Returns True if the issuer's key has signed the certificate. Checks neither lifetime nor usage."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, UnsupportedAlgorithm, TypeError, ValueError):
        return False
    return True


def is_current(certificate: x509.Certificate, at: datetime | None = None) -> bool:
    """Returns True if a certificate is valid at a time, by default now."""
    return certificate.not_valid_before_utc <= (at or now()) <= certificate.not_valid_after_utc


def require_identity(identity: Identity, *, kind: Kind) -> None:
    """Raises `CertificateError` unless the certificate is of this kind and valid now, and the key fits it."""
    certificate = load_certificates(identity.certificate)[0]
    found = kind_of(certificate)
    if found is not kind:
        raise CertificateError(
            f"{identity.certificate} is {'not a' if found is None else f'a {found} certificate, not a'} {kind} "
            f"certificate: create one with `symbiosis-priv keys {'request' if kind is Kind.TENANT else kind}`"
        )
    require_usable(identity, certificate, fix=lambda: how_to_renew(identity))


def how_to_renew(identity: Identity, *, prepare: bool = False) -> str:
    """The command that renews a pair, as text for a message. With `prepare`, the command keeps a self-signed pair and
    creates a next pair, which others can pin first."""
    path = identity.certificate
    certificate = load_certificates(path)[0]
    options = f"--name {shlex.quote(path.stem)} --directory {shlex.quote(str(path.parent))}`"
    if certificate.issuer == certificate.subject:
        return f"run `symbiosis-priv keys rotate{' --prepare' if prepare else ''} {options}"
    provider = " --provider" if kind_of(certificate) is Kind.PROVIDER else ""
    return (
        f"run `symbiosis-priv keys request{provider} {options}, have the signer of the current certificate sign the "
        f"request, and put the {path.name} that you receive into {path.parent}"
    )


def require_usable(identity: Identity, certificate: x509.Certificate, *, fix: Callable[[], str]) -> PrivateKeyTypes:
    """The private key of a pair. Raises `CertificateError`, with the advice that `fix` returns, if the certificate is
    not valid now, or the key does not fit it or cannot be read."""
    if not is_current(certificate):
        raise CertificateError(
            f"{identity.certificate} is valid only from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} to "
            f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: check the clock, or {fix()}"
        )
    key = identity.private_key()
    if key.public_key() != certificate.public_key():
        raise CertificateError(f"{identity.key} is not the key of {identity.certificate}: restore it, or {fix()}")
    return key


def usages(certificate: x509.Certificate) -> list[x509.ObjectIdentifier]:
    return list(_extension(certificate, x509.ExtendedKeyUsage) or ())


def alternative_names(certificate: x509.Certificate) -> list[x509.GeneralName]:
    return list(_extension(certificate, x509.SubjectAlternativeName) or ())


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """The DNS names and IP addresses among the subject alternative names."""
    names = alternative_names(certificate)
    return tuple(str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress))


def _extension(certificate: x509.Certificate, kind: type[_Extension]) -> _Extension | None:
    """The extension; None if it is absent or malformed, so that a malformed certificate has no kind."""
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return None


def sign(key: PrivateKeyTypes, message: bytes) -> bytes:
    """Sign a message, which begins with the domain of its kind. Raises `CertificateError`: a key of another kind."""
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError("the key is not an elliptic-curve key: make one with `keys request --provider`")
    return key.sign(message, _ECDSA)


def is_signed(key: PublicKeyTypes, message: bytes, signature: bytes) -> bool:
    """Returns True if the signature of the message is by this key. False also for a key of another kind."""
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(signature, message, _ECDSA)
    except InvalidSignature:
        return False
    return True


def warn_of_exposed_key(key: Path) -> None:
    """Logs a warning, once, if other users of this machine may read or write a key file."""
    if os.name == "posix" and key.exists() and (mode := stat.S_IMODE(key.stat().st_mode)) & 0o077:
        _warn_once("key_exposed", f"{key} is open to other users of this machine (mode {mode:03o}): chmod 600 {key}")


def expiry(path: Path) -> datetime:
    """When the next certificate of a file expires. When the last one has expired, if none is left."""
    ends = [certificate.not_valid_after_utc for certificate in load_certificates(path)]
    return min((end for end in ends if end > now()), default=max(ends))


def warn_of_expiry(path: Path, *, fix: Callable[[], str]) -> None:
    """Logs a warning, once a day, if a certificate of a file expires within 14 days, or if all have expired."""
    until = expiry(path)
    left = until - now()
    if left < SOON:
        when = f"expires in {left.days} days, on" if left.days >= 0 else f"expired {-left.days} days ago, on"
        _warn_once("certificate_expires", f"{path} {when} {until:%Y-%m-%d %H:%M} UTC: {fix()}")


def _warn_once(event: str, text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text, extra={"event": event})
