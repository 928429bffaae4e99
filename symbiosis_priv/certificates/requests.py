"""A tenant's key never leaves its machine: the tenant writes a request (PKCS #10), the executor's operator signs it.

    tenant      keys/alice.key (mode 0600) and keys/alice.csr     create_request
    operator    reads alice.csr, writes keys/alice.pem            sign_request
    tenant      puts alice.pem beside its key

A request is a stranger's bytes. Its signature proves that whoever wrote it holds the key, and nothing else of it is
believed: the name is checked, and whatever extensions it asks for are ignored, since what a tenant's certificate says
is fixed. The operator's folder is the record of names: while `alice.pem` lies there, no other key becomes alice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from symbiosis_priv.certificates.issuing import LeafKey, issue_to_key
from symbiosis_priv.certificates.naming import check_name, subject
from symbiosis_priv.certificates.pem import certificate_pem, create_file, key_pem, make_folder, read_file, replace_file
from symbiosis_priv.certificates.reading import (
    Identity,
    Kind,
    is_current,
    key_fingerprint,
    load_certificates,
    pair,
    tenant_name,
)
from symbiosis_priv.errors import CertificateError

_MAKE = "make one with `symbiosis-priv keys request`"


@dataclass(frozen=True)
class Request:
    """What a request asks for, once its signature has been checked.

    Args:
        name: the tenant's.
        public_key: to be certified.
        fingerprint: of that key; the tenant sees the same one.
    """

    name: str
    public_key: LeafKey
    fingerprint: str


def create_request(directory: Path, *, name: str) -> Path:
    """Writes `<name>.csr`, and `<name>.key` unless it is there already; then the request is for that key (a renewal).

    Raises:
        ConfigError: a bad name.
        CertificateError: a file cannot be written, or the key that is there cannot be used.
    """
    check_name(name)
    make_folder(directory)
    identity = pair(directory, name)
    if identity.certificate.exists() and tenant_name(load_certificates(identity.certificate)[0]) != name:
        raise CertificateError(f"{identity.certificate} is not the certificate of a tenant {name}: choose another name")
    if identity.key.exists():
        key = identity.private_key()
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateError(f"{identity.key} is no elliptic-curve key: choose another name or directory")
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        create_file(identity.key, key_pem(key), mode=0o600)
    request = x509.CertificateSigningRequestBuilder().subject_name(subject(name, unit=Kind.TENANT))
    path = directory / f"{name}.csr"
    replace_file(path, certificate_pem(request.sign(key, hashes.SHA256())), mode=0o644)
    return path


def load_request(path: Path) -> Request:
    """Reads and checks a request. Raises `CertificateError` for whatever is not one, `ConfigError` for a bad name."""
    try:
        request = x509.load_pem_x509_csr(read_file(path))
        key = request.public_key()
        signed = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise CertificateError(f"{path} is no certificate request in PEM: {_MAKE}") from error
    if not signed:
        raise CertificateError(f"{path} is not signed by the key that it names: it was altered, or {_MAKE}")
    if not isinstance(key, LeafKey):
        raise CertificateError(f"{path} is for a key that is neither elliptic-curve nor Ed25519: {_MAKE}")
    names = [str(attribute.value) for attribute in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if len(names) != 1:
        raise CertificateError(f"{path} has {len(names)} common names where the tenant's one name belongs: {_MAKE}")
    check_name(names[0])
    return Request(names[0], key, key_fingerprint(request))


def sign_request(
    request: Request, *, authority: Identity, directory: Path, days: int = 365, renew: bool = False
) -> Path:
    """Writes `<name>.pem` for a request. Those before it that are still good stay in `<name>.previous.pem`, so that
    they can be revoked with it.

    Args:
        authority: as made by `create_authority`; the new certificate does not outlive it.
        directory: the record of names.
        renew: let a new key take over the name.

    Raises:
        ConfigError: a bad lifetime.
        CertificateError: another key, or something that is no tenant, has the name (case does not count); or the
            authority is unusable.
    """
    _require_free(directory, request, renew=renew)
    certificate = issue_to_key(request.public_key, name=request.name, authority=authority, days=days)
    path = pair(directory, request.name).certificate
    earlier = path.with_name(f"{request.name}.previous.pem")
    issued = [c for file in (path, earlier) if file.exists() for c in load_certificates(file) if is_current(c)]
    if issued:
        replace_file(earlier, b"".join(map(certificate_pem, issued)), mode=0o644)
    replace_file(path, certificate_pem(certificate), mode=0o644)
    return path


def _require_free(directory: Path, request: Request, *, renew: bool) -> None:
    """Looks at every certificate of the folder: the name may be a file's, or written in one under another file name."""
    for path in sorted(directory.glob("*.pem")):
        if path.name.endswith(".previous.pem"):
            continue
        certificate = load_certificates(path)[0]
        names = (path.stem, tenant_name(certificate) or "")
        if request.name.casefold() not in map(str.casefold, names):
            continue
        if tenant_name(certificate) != request.name:
            raise CertificateError(
                f"{path} is somebody else's, and the name {request.name} too close to it: choose another"
            )
        if key_fingerprint(certificate) != request.fingerprint and not renew:
            raise CertificateError(
                f"{path} already gives the name {request.name} to another key: if this tenant has made a new key, "
                f"confirm its fingerprint and pass --renew; if not, it needs another name"
            )
