"""Creates and signs certificate requests (PKCS #10), so that a private key never leaves its machine.

    tenant      creates keys/alice.key (mode 0600) and keys/alice.csr     create_request
    operator    reads alice.csr, writes keys/alice.pem                    sign_request
    tenant      puts alice.pem into the folder of its key

A provider's operator sends its request to the owner of a federation's authority, which certifies the provider's
operator and hosts.

A request is untrusted. Its signature proves that the sender holds the key. The requested name is checked, and requested
extensions are ignored. The content of a tenant's certificate is fixed; the signer states the operator and the hosts of
a provider. The signer's folder is the record of names: while `alice.pem` exists there, no other key is certified as
alice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from symbiosis_priv.certificates import reading
from symbiosis_priv.certificates.issuing import LeafKey, current_certificates, issue_to_key
from symbiosis_priv.certificates.naming import check_name, subject
from symbiosis_priv.certificates.pem import certificate_pem, create_file, key_pem, make_folder, read_file, replace_file
from symbiosis_priv.errors import CertificateError, ConfigError

_MAKE = "make one with `symbiosis-priv keys request`"


@dataclass(frozen=True)
class SigningRequest:
    """A request with a valid signature. `keys request` shows the same fingerprint to the owner of the key."""

    kind: reading.Kind
    name: str
    public_key: LeafKey
    fingerprint: str


def create_request(directory: Path, *, name: str, kind: reading.Kind = reading.Kind.TENANT) -> Path:
    """Writes `<name>.csr`, and `<name>.key` unless it exists. A request for an existing key renews a certificate.
    Raises `ConfigError`: a bad name; `CertificateError`: a file cannot be written, or the existing key or certificate
    cannot be used."""
    check_name(name)
    make_folder(directory)
    identity = reading.pair(directory, name)
    if identity.certificate.exists() and _names(reading.load_certificates(identity.certificate)[0])[kind] != name:
        raise CertificateError(f"{identity.certificate} is not the certificate of a {kind} {name}: choose another name")
    if identity.key.exists():
        key = identity.private_key()
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateError(f"{identity.key} is not an elliptic-curve key: choose another name or directory")
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        create_file(identity.key, key_pem(key), mode=0o600)
    request = x509.CertificateSigningRequestBuilder().subject_name(subject(name, unit=kind))
    path = directory / f"{name}.csr"
    replace_file(path, certificate_pem(request.sign(key, hashes.SHA256())), mode=0o644)
    return path


def load_request(path: Path) -> SigningRequest:
    """Reads a request and checks its signature. Raises `CertificateError`: the file is not a request, its signature is
    not valid, or its key type is not supported; `ConfigError`: a bad name."""
    try:
        request = x509.load_pem_x509_csr(read_file(path))
        asked_for, key = request.subject, request.public_key()
        signed = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature, x509.InvalidVersion) as error:
        raise CertificateError(f"{path} is not a certificate request in PEM: {_MAKE}") from error
    if not signed:
        raise CertificateError(f"{path} is not signed by the key that it names: it was altered, or {_MAKE}")
    if not isinstance(key, LeafKey):
        raise CertificateError(f"{path} is for a key that is neither elliptic-curve nor Ed25519: {_MAKE}")
    name = reading.sole_attribute(asked_for, NameOID.COMMON_NAME)
    if name is None:
        raise CertificateError(f"{path} does not have exactly one common name: {_MAKE}")
    check_name(name)
    unit = reading.sole_attribute(asked_for, NameOID.ORGANIZATIONAL_UNIT_NAME)
    return SigningRequest(
        reading.Kind.PROVIDER if unit == reading.Kind.PROVIDER else reading.Kind.TENANT,
        name,
        key,
        reading.key_fingerprint(request),
    )


def sign_request(
    request: SigningRequest,
    *,
    authority: reading.Identity,
    directory: Path,
    operator: str | None = None,
    hosts: Sequence[str] = (),
    days: int = 365,
    renew: bool = False,
) -> Path:
    """Issues `<name>.pem` for a request. `<name>.previous.pem` keeps the earlier certificates that are still valid, so
    that they can be revoked too.

    Args:
        authority: a result of `create_authority`; the new certificate expires with the authority's or before.
        directory: folder of the issued certificates: the record of names.
        operator: company that runs the provider, certified by the signer; None for a tenant.
        hosts: DNS names and IP addresses of the provider, certified by the signer; empty for a tenant.
        renew: certify a new key under an existing name.

    Raises:
        ConfigError: a bad lifetime, operator or host; or a provider without operator or hosts, or a tenant with one.
        CertificateError: the name belongs to another key or to a certificate of another kind (case does not count); or
            the authority is unusable.
    """
    if request.kind is reading.Kind.PROVIDER and not (operator and hosts):
        raise ConfigError(
            f"{request.name} asks for a provider's certificate: find out which company runs it and where, then pass "
            f"--operator 'Alpha GmbH' --host alpha.example"
        )
    _require_free(directory, request, renew=renew)
    certificate = issue_to_key(
        request.public_key,
        signer=authority,
        kind=request.kind,
        name=request.name,
        hosts=hosts,
        operator=operator,
        days=days,
    )
    path = reading.pair(directory, request.name).certificate
    earlier = path.with_name(f"{request.name}.previous.pem")
    if issued := current_certificates(path, earlier):
        replace_file(earlier, b"".join(map(certificate_pem, issued)), mode=0o644)
    replace_file(path, certificate_pem(certificate), mode=0o644)
    return path


def _require_free(directory: Path, request: SigningRequest, *, renew: bool) -> None:
    """Checks the name against every certificate of the folder: against its file name and the names inside. Raises
    `CertificateError`: the name is taken."""
    for path in sorted(directory.glob("*.pem")):
        if path.name.endswith(".previous.pem"):
            continue
        certificate = reading.load_certificates(path)[0]
        names = _names(certificate)
        if request.name.casefold() not in (name.casefold() for name in (path.stem, *names.values()) if name):
            continue
        if names[request.kind] != request.name:
            raise CertificateError(
                f"{path} has the name {request.name}, another case of it, or another kind: choose another name"
            )
        if reading.key_fingerprint(certificate) != request.fingerprint and not renew:
            raise CertificateError(
                f"{path} already gives the name {request.name} to another key: if {request.name} has made a new key, "
                f"confirm its fingerprint and pass --renew; if not, it needs another name"
            )


def _names(certificate: x509.Certificate) -> dict[reading.Kind, str | None]:
    """The names of the tenant and of the provider in a certificate; one of them at most is not None."""
    return {
        reading.Kind.TENANT: reading.tenant_name(certificate),
        reading.Kind.PROVIDER: reading.provider_name(certificate),
    }
