"""A key never leaves its machine: whoever made it writes a request (PKCS #10), and whoever has the authority signs it.

    tenant      keys/alice.key (mode 0600) and keys/alice.csr     create_request
    operator    reads alice.csr, writes keys/alice.pem            sign_request
    tenant      puts alice.pem beside its key

A provider's operator does the same with the authority of a federation, which vouches for who runs it and where.

A request is a stranger's bytes. Its signature proves that whoever wrote it holds the key, and nothing else of it is
believed: the name is checked, and whatever extensions it asks for are ignored. What a tenant's certificate says is
fixed; operator and hosts of a provider are the signer's to say. The signer's folder is the record of names: while
`alice.pem` lies there, no other key becomes alice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from symbiosis_priv.certificates.issuing import LeafKey, current_certificates, issue_to_key
from symbiosis_priv.certificates.naming import check_name, subject
from symbiosis_priv.certificates.pem import certificate_pem, create_file, key_pem, make_folder, read_file, replace_file
from symbiosis_priv.certificates.reading import (
    Identity,
    Kind,
    key_fingerprint,
    load_certificates,
    pair,
    provider_name,
    sole_attribute,
    tenant_name,
)
from symbiosis_priv.errors import CertificateError, ConfigError

_MAKE = "make one with `symbiosis-priv keys request`"


@dataclass(frozen=True)
class Request:
    """What a request asks for, once its signature has been checked.

    Args:
        kind: of the certificate.
        name: the tenant's, or the provider's.
        public_key: to be certified.
        fingerprint: of that key; whoever made it sees the same one.
    """

    kind: Kind
    name: str
    public_key: LeafKey
    fingerprint: str


def create_request(directory: Path, *, name: str, kind: Kind = Kind.TENANT) -> Path:
    """Writes `<name>.csr`, and `<name>.key` unless it is there already; then the request is for that key (a renewal).

    Raises:
        ConfigError: a bad name.
        CertificateError: a file cannot be written, or the key that is there cannot be used.
    """
    check_name(name)
    make_folder(directory)
    identity = pair(directory, name)
    if identity.certificate.exists() and _names(load_certificates(identity.certificate)[0])[kind] != name:
        raise CertificateError(f"{identity.certificate} is not the certificate of a {kind} {name}: choose another name")
    if identity.key.exists():
        key = identity.private_key()
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateError(f"{identity.key} is no elliptic-curve key: choose another name or directory")
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        create_file(identity.key, key_pem(key), mode=0o600)
    request = x509.CertificateSigningRequestBuilder().subject_name(subject(name, unit=kind))
    path = directory / f"{name}.csr"
    replace_file(path, certificate_pem(request.sign(key, hashes.SHA256())), mode=0o644)
    return path


def load_request(path: Path) -> Request:
    """Reads and checks a request. Raises `CertificateError` for whatever is not one, `ConfigError` for a bad name."""
    try:
        request = x509.load_pem_x509_csr(read_file(path))
        asked_for, key = request.subject, request.public_key()
        signed = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature, x509.InvalidVersion) as error:
        raise CertificateError(f"{path} is no certificate request in PEM: {_MAKE}") from error
    if not signed:
        raise CertificateError(f"{path} is not signed by the key that it names: it was altered, or {_MAKE}")
    if not isinstance(key, LeafKey):
        raise CertificateError(f"{path} is for a key that is neither elliptic-curve nor Ed25519: {_MAKE}")
    name = sole_attribute(asked_for, NameOID.COMMON_NAME)
    if name is None:
        raise CertificateError(f"{path} does not have the one common name that is its maker's: {_MAKE}")
    check_name(name)
    unit = sole_attribute(asked_for, NameOID.ORGANIZATIONAL_UNIT_NAME)
    return Request(Kind.PROVIDER if unit == Kind.PROVIDER else Kind.TENANT, name, key, key_fingerprint(request))


def sign_request(
    request: Request,
    *,
    authority: Identity,
    directory: Path,
    operator: str | None = None,
    hosts: Sequence[str] = (),
    days: int = 365,
    renew: bool = False,
) -> Path:
    """Writes `<name>.pem` for a request. Those before it that are still good stay in `<name>.previous.pem`, so that
    they can be revoked with it.

    Args:
        authority: as made by `create_authority`; the new certificate does not outlive it.
        directory: the record of names.
        operator: who runs a provider: the signer vouches for it. A tenant has none.
        hosts: where a provider may be reached, likewise.
        renew: let a new key take over the name.

    Raises:
        ConfigError: a bad lifetime, operator or host; a provider's lacks one, a tenant's has one.
        CertificateError: another key, or something of another kind, has the name (case does not count); or the
            authority is unusable.
    """
    if request.kind is Kind.PROVIDER and not (operator and hosts):
        raise ConfigError(
            f"{request.name} asks for a provider's certificate: once you have made sure who runs it and where, say so "
            f"with --operator 'Alpha GmbH' --host alpha.example"
        )
    _require_free(directory, request, renew=renew)
    certificate = issue_to_key(
        request.public_key,
        authority=authority,
        kind=request.kind,
        name=request.name,
        hosts=hosts,
        operator=operator,
        days=days,
    )
    path = pair(directory, request.name).certificate
    earlier = path.with_name(f"{request.name}.previous.pem")
    if issued := current_certificates(path, earlier):
        replace_file(earlier, b"".join(map(certificate_pem, issued)), mode=0o644)
    replace_file(path, certificate_pem(certificate), mode=0o644)
    return path


def _require_free(directory: Path, request: Request, *, renew: bool) -> None:
    """Looks at every certificate of the folder: the name may be a file's, or written in one under another file name."""
    for path in sorted(directory.glob("*.pem")):
        if path.name.endswith(".previous.pem"):
            continue
        certificate = load_certificates(path)[0]
        names = _names(certificate)
        if request.name.casefold() not in (name.casefold() for name in (path.stem, *names.values()) if name):
            continue
        if names[request.kind] != request.name:
            raise CertificateError(
                f"{path} is somebody else's, and the name {request.name} too close to it: choose another"
            )
        if key_fingerprint(certificate) != request.fingerprint and not renew:
            raise CertificateError(
                f"{path} already gives the name {request.name} to another key: if {request.name} has made a new key, "
                f"confirm its fingerprint and pass --renew; if not, it needs another name"
            )


def _names(certificate: x509.Certificate) -> dict[Kind, str | None]:
    """What it calls a tenant, and what a provider: one of them at most."""
    return {Kind.TENANT: tenant_name(certificate), Kind.PROVIDER: provider_name(certificate)}
