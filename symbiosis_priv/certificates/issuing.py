"""Creates certificates of authorities, providers and tenants, signs requests, and rotates self-signed pairs.

A key file is created with mode 0600 and is never overwritten. Only `rotate` replaces a key file, and keeps the old pair
under another name. Keys are ECDSA P-256, which every TLS 1.3 stack supports. With a certificate request (PKCS #10), a
private key never leaves its machine.

A request is untrusted. Its signature proves that the sender holds the key. The requested name is checked, and requested
extensions are ignored. The content of a tenant's certificate is fixed; the signer states the operator and the hosts of
a provider. The signer's folder is the record of names: while `alice.pem` exists there, no other key is certified as
alice.
"""

import inspect
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from symbiosis_priv.certificates import reading
from symbiosis_priv.certificates.naming import NEXT, PREVIOUS, TENANT_URN, check_name, subject
from symbiosis_priv.certificates.pem import certificate_pem, create_file, key_pem, read_file
from symbiosis_priv.errors import CertificateError, ConfigError
from symbiosis_priv.system.files import write_atomically

DEFAULT_HOSTS: Final = ("localhost", "127.0.0.1")
MAX_DAYS: Final = 36_500

_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
# Wildcards and a numeric last label do not match: 10.0.0.256 is a mistyped address, not a DNS name.
_DNS_NAME: Final = re.compile(rf"(?:{_LABEL}\.)*(?![0-9]+\Z){_LABEL}")
_CLOCK_SKEW: Final = timedelta(minutes=5)
_KEY_USES: Final = tuple(inspect.signature(x509.KeyUsage).parameters)

_USAGES: Final = {
    reading.Kind.PROVIDER: [ExtendedKeyUsageOID.SERVER_AUTH],
    reading.Kind.TENANT: [ExtendedKeyUsageOID.CLIENT_AUTH],
}
Signer = reading.Identity | ec.EllipticCurvePrivateKey
"""An authority; or, for a self-signed certificate, the private key of the certificate."""


def create_authority(directory: Path, *, name: str = "authority", days: int = 3650) -> reading.Identity:
    """Creates a certificate authority for tenants or providers: `<name>.pem` and `<name>.key`. Raises `ConfigError` for
    a bad name or lifetime, `CertificateError` if either file exists."""
    key = ec.generate_private_key(ec.SECP256R1())
    # path_length=0: a tenant's certificate can never sign another one.
    extensions = [x509.BasicConstraints(ca=True, path_length=0), _key_usage("key_cert_sign", "crl_sign")]
    owner = subject(name, unit="authority")
    certificate = _sign(owner, public_key=key.public_key(), extensions=extensions, days=days, signer=key)
    return _write_pair(directory, name=name, certificate=certificate, key=key)


def issue(
    directory: Path,
    *,
    authority: reading.Identity | None,
    kind: reading.Kind,
    name: str,
    hosts: Sequence[str] = (),
    days: int = 365,
    operator: str | None = None,
) -> reading.Identity:
    """Issues `<name>.pem` and `<name>.key`. The authority signs the certificate, which expires with the authority's or
    before; without one, it is self-signed. A provider has `hosts` (DNS names and IP addresses, by default
    `DEFAULT_HOSTS`) and perhaps an `operator`, the company that runs it; a tenant has neither. Raises `ConfigError` for
    a bad name, host, operator or lifetime, `CertificateError` if a file exists or the authority is unusable."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = issue_to_key(
        key.public_key(), signer=authority or key, kind=kind, name=name, hosts=hosts, operator=operator, days=days
    )
    return _write_pair(directory, name=name, certificate=certificate, key=key)


def issue_to_key(
    public_key: ec.EllipticCurvePublicKey,
    *,
    signer: Signer,
    kind: reading.Kind,
    name: str,
    hosts: Sequence[str],
    days: int,
    operator: str | None,
) -> x509.Certificate:
    """Issues a certificate for an existing public key, without writing a file. Arguments and errors as for `issue`."""
    owner = subject(name, unit=kind, operator=operator)
    names: list[x509.GeneralName]
    if kind is reading.Kind.PROVIDER:
        names = [_host(host) for host in hosts or DEFAULT_HOSTS]
    elif hosts:
        raise ConfigError(f"hosts={list(hosts)}: a tenant's certificate names no hosts, leave them out")
    elif operator is not None:
        raise ConfigError(f"operator={operator!r}: a tenant's certificate names no operator, leave it out")
    else:
        names = [x509.UniformResourceIdentifier(TENANT_URN + name)]
    extensions = [x509.SubjectAlternativeName(names), *_leaf_usage(kind)]
    return _sign(owner, public_key=public_key, extensions=extensions, days=days, signer=signer)


def prepare_rotation(certificate: Path, *, days: int = 365) -> reading.Identity:
    """Creates the pair that `rotate` will use later: `<name>.next.pem` and `<name>.next.key`. Tenants can then pin a
    provider's next certificate while the provider still shows the current one. Raises as `rotate`, and
    `CertificateError` also if a next pair exists."""
    check_name(certificate.stem)
    old = reading.load_certificates(certificate)[0]
    current = reading.pair(certificate.parent, certificate.stem)
    if (kind := reading.kind_of(old)) is None:
        raise CertificateError(
            f"{certificate} is not a provider's: to replace an authority, create a second one and list both in the "
            f"provider's tenant_authority file until every tenant has moved"
        )
    if old.issuer != old.subject:
        raise CertificateError(
            f"{certificate} was issued by an authority: where its key is, {reading.how_to_renew(current)}"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    public, names = key.public_key(), x509.SubjectAlternativeName(reading.alternative_names(old))
    new = _sign(old.subject, public_key=public, extensions=[names, *_leaf_usage(kind)], days=days, signer=key)
    return _write_pair(certificate.parent, name=certificate.stem + NEXT, certificate=new, key=key)


def rotate(certificate: Path, *, days: int = 365) -> reading.Identity:
    """Replaces a self-signed pair by its next pair, or a new one with the same subject, alternative names and usage.

    The old pair is kept as `<name>.previous.pem` and `<name>.previous.key`. `<name>.previous.pem` also keeps the
    certificates of earlier rotations, after the old one and until they expire, so that they can be revoked. Each file
    is replaced atomically, the key first: a program that loads the pair in between gets a `CertificateError` about a
    mismatch and may retry. Rotation also repairs a pair whose key is lost.

    Raises `CertificateError` for an authority's certificate (create a second authority instead), and for one that an
    authority has issued (request another)."""
    upcoming = reading.pair(certificate.parent, certificate.stem + NEXT)
    if not upcoming.certificate.exists():
        prepare_rotation(certificate, days=days)
    new = reading.load_certificates(upcoming.certificate)[0]
    reading.require_usable(upcoming, new, fix=lambda: f"remove {upcoming.certificate} to make another")
    old = reading.load_certificates(certificate)[0]
    current = reading.pair(certificate.parent, certificate.stem)
    previous = reading.pair(certificate.parent, certificate.stem + PREVIOUS)
    try:
        has_old_key = current.private_key().public_key() == old.public_key()
    except CertificateError:  # the key is lost
        has_old_key = False
    if has_old_key:  # if not, an interrupted rotation may have kept it already
        write_atomically(previous.key, read_file(current.key), mode=0o600)
    earlier = [c for c in current_certificates(previous.certificate) if c != old]
    write_atomically(previous.certificate, b"".join(map(certificate_pem, [old, *earlier])))
    write_atomically(current.key, read_file(upcoming.key), mode=0o600)
    write_atomically(current.certificate, certificate_pem(new))
    upcoming.key.unlink()
    upcoming.certificate.unlink()
    return current


def current_certificates(*files: Path) -> list[x509.Certificate]:
    """The certificates of some files that are valid now, without duplicates. Missing files are skipped."""
    found = (c for file in files if file.exists() for c in reading.load_certificates(file))
    return list(dict.fromkeys(filter(reading.is_current, found)))


def _sign(
    owner: x509.Name,
    *,
    public_key: ec.EllipticCurvePublicKey,
    extensions: Sequence[x509.ExtensionType],
    days: int,
    signer: Signer,
) -> x509.Certificate:
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError(f"days={days}: choose a lifetime from 1 to {MAX_DAYS} days")
    not_after, issuer = reading.now() + timedelta(days=days), owner
    if isinstance(signer, reading.Identity):
        identity, fix = signer, "create an authority with `symbiosis-priv keys authority`"
        authority = reading.load_certificates(identity.certificate)[0]
        if not reading.is_authority(authority):
            raise CertificateError(f"{identity.certificate} is not a CA certificate: {fix}")
        key = reading.require_usable(identity, authority, fix=lambda: fix)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateError(f"{identity.key} is not an elliptic-curve key: {fix}")
        signer = key
        not_after, issuer = min(not_after, authority.not_valid_after_utc), authority.subject
    builder = (
        x509.CertificateBuilder()
        .subject_name(owner)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(reading.now() - _CLOCK_SKEW)
        .not_valid_after(not_after)
        # After a rotation, two certificates have one subject. The key identifiers differ.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    for extension in extensions:
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signer, hashes.SHA256())


def _leaf_usage(kind: reading.Kind) -> list[x509.ExtensionType]:
    # a signature is the only use of a key that TLS 1.3 needs
    usages = [_key_usage("digital_signature"), x509.ExtendedKeyUsage(_USAGES[kind])]
    return [x509.BasicConstraints(ca=False, path_length=None), *usages]


def _key_usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in allowed for use in _KEY_USES})


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if len(host) > 253 or not _DNS_NAME.fullmatch(host):
            raise ConfigError(
                f"host {host!r}: use a DNS name or an IP address, without scheme, port or wildcard"
            ) from None
        return x509.DNSName(host)


def _write_pair(
    directory: Path, *, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> reading.Identity:
    identity = reading.pair(directory, name)
    create_file(identity.key, key_pem(key), mode=0o600)
    try:
        create_file(identity.certificate, certificate_pem(certificate), mode=0o644)
    except BaseException:
        identity.key.unlink()  # created above: a key must not stay without its certificate
        raise
    return identity


_MAKE = "make one with `symbiosis-priv keys request`"


@dataclass(frozen=True)
class SigningRequest:
    """A request with a valid signature. `keys request` shows the same key fingerprint to the owner of the key."""

    kind: reading.Kind
    name: str
    public_key: ec.EllipticCurvePublicKey
    key_fingerprint: str


def create_request(directory: Path, *, name: str, kind: reading.Kind = reading.Kind.TENANT) -> Path:
    """Writes `<name>.csr`, and `<name>.key` unless it exists: a request for an existing key renews a certificate.
    Raises `ConfigError`: a bad name; `CertificateError`: a file cannot be written or used."""
    check_name(name)
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
    write_atomically(path, certificate_pem(request.sign(key, hashes.SHA256())))
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
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise CertificateError(f"{path} is not for an elliptic-curve key: {_MAKE}")
    name = reading.sole_attribute(asked_for, NameOID.COMMON_NAME)
    if name is None:
        raise CertificateError(f"{path} does not have exactly one common name: {_MAKE}")
    check_name(name)
    unit = reading.sole_attribute(asked_for, NameOID.ORGANIZATIONAL_UNIT_NAME)
    kind = reading.Kind.PROVIDER if unit == reading.Kind.PROVIDER else reading.Kind.TENANT
    return SigningRequest(kind, name, key, reading.key_fingerprint(request))


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
    that they can be revoked too. The name is checked against every certificate of the folder: against its file name and
    the names inside. Raises `ConfigError`: a bad lifetime, operator or host; or a provider without operator or hosts,
    or a tenant with one; `CertificateError`: the name belongs to another key or to a certificate of another kind (case
    does not count); or the authority is unusable. With `renew`, a new key may take an existing name. The signer
    certifies operator and hosts, as for `issue`."""
    if request.kind is reading.Kind.PROVIDER and not (operator and hosts):
        raise ConfigError(
            f"{request.name} asks for a provider's certificate: find out which company runs it and where, then pass "
            f"--operator 'Alpha GmbH' --host alpha.example"
        )
    for path in sorted(directory.glob("*.pem")):
        if path.name.endswith(f"{PREVIOUS}.pem"):
            continue
        found = reading.load_certificates(path)[0]
        names = _names(found)
        if request.name.casefold() not in (name.casefold() for name in (path.stem, *names.values()) if name):
            continue
        if names[request.kind] != request.name:
            raise CertificateError(
                f"{path} has the name {request.name}, another case of it, or another kind: choose another name"
            )
        if reading.key_fingerprint(found) != request.key_fingerprint and not renew:
            raise CertificateError(
                f"{path} already gives the name {request.name} to another key: if {request.name} has made a new key, "
                f"confirm its fingerprint and pass --renew; if not, it needs another name"
            )
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
    earlier = path.with_name(f"{request.name}{PREVIOUS}.pem")
    if issued := current_certificates(path, earlier):
        write_atomically(earlier, b"".join(map(certificate_pem, issued)))
    write_atomically(path, certificate_pem(certificate))
    return path


def _names(certificate: x509.Certificate) -> dict[reading.Kind, str | None]:
    """The names of the tenant and of the provider in a certificate; one of them at most is not None."""
    tenant, provider = reading.tenant_name(certificate), reading.provider_name(certificate)
    return {reading.Kind.TENANT: tenant, reading.Kind.PROVIDER: provider}
