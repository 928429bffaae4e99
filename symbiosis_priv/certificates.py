"""Certificates for mutual TLS: an authority, providers, tenants, and their rotation.

A tenant pins its provider's certificate itself, so a provider needs no authority and may be self-signed.
A provider knows its tenants by the authority that issued their certificates. Kind and name live in the
certificate: a provider carries `serverAuth` and its hosts, a tenant `clientAuth` and
`urn:symbiosis-priv:tenant:<name>`, so neither can stand in for the other.

Keys are ECDSA P-256, which every TLS 1.3 stack supports. A key file is created with mode 0600 and is never
overwritten; only `rotate` replaces one, and keeps the old pair beside it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from symbiosis_priv.errors import CertificateError, ConfigError
from symbiosis_priv.pem import certificate_pem, create_file, key_pem, make_folder, read_file, replace_file

__all__ = [
    "DEFAULT_HOSTS",
    "Description",
    "Identity",
    "Kind",
    "LeafKey",
    "check_name",
    "create_authority",
    "create_self_signed",
    "describe",
    "fingerprint",
    "is_authority",
    "is_current",
    "is_issued_by",
    "issue",
    "issue_to_key",
    "key_fingerprint",
    "kind_of",
    "load_certificates",
    "load_pin",
    "pair",
    "prepare_rotation",
    "require_identity",
    "rotate",
    "subject",
    "tenant_name",
    "warn_of_expiry",
    "warn_of_exposed_key",
]

DEFAULT_HOSTS: Final = ("localhost", "127.0.0.1")
MAX_DAYS: Final = 36_500

_TENANT_URN: Final = "urn:symbiosis-priv:tenant:"
_NAME: Final = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
# No wildcard, and no numeric last label: 10.0.0.256 is a mistyped address, not a DNS name.
_DNS_NAME: Final = re.compile(rf"(?:{_LABEL}\.)*(?![0-9]+\Z){_LABEL}")
_PREVIOUS: Final = ".previous"
_NEXT: Final = ".next"
_SOON: Final = timedelta(days=14)
_CLOCK_SKEW: Final = timedelta(minutes=5)

log = logging.getLogger(__name__)
_warned: set[str] = set()


LeafKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey
"""What providers and tenants may have."""

_Extension = TypeVar("_Extension", bound=x509.ExtensionType)


class Kind(StrEnum):
    """What a certificate may be used for."""

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
                f"{self.key} is not an unencrypted PEM private key: restore it, or run `symbiosis-priv keys rotate`"
            ) from error


@dataclass(frozen=True)
class Description:
    """What `symbiosis-priv keys show` prints about one certificate."""

    subject: str
    kind: Kind | Literal["authority", "other"]
    hosts: tuple[str, ...]
    not_after: datetime
    fingerprint: str


@dataclass(frozen=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


# Creating


def create_authority(directory: Path, *, name: str = "authority", days: int = 3650) -> Identity:
    """Creates a certificate authority for tenants: `<name>.pem` and `<name>.key`.

    Raises `ConfigError` for a bad name or lifetime, `CertificateError` if either file exists.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = _sign(
        subject(name, unit="authority"),
        public_key=key.public_key(),
        # path_length=0: a tenant's certificate can never sign another one.
        extensions=[x509.BasicConstraints(ca=True, path_length=0), usage],
        days=days,
        signer=key,
    )
    return _write_pair(directory, name=name, certificate=certificate, key=key)


def issue(
    directory: Path, *, authority: Identity, kind: Kind, name: str, hosts: Sequence[str] = (), days: int = 365
) -> Identity:
    """Issues `<name>.pem` and `<name>.key`, signed by `authority`.

    Args:
        authority: as made by `create_authority`; the new certificate does not outlive it.
        name: 1 to 64 of `A-Za-z0-9._-`, no leading dot; for a tenant, the name that providers see.
        hosts: DNS names and IP addresses of a provider, by default localhost; a tenant has none.
        days: lifetime.

    Raises `ConfigError` for a bad name, host or lifetime, `CertificateError` if a file exists or the
    authority is unusable.
    """
    signer = _load_authority(authority)
    return _create(directory, kind=kind, name=name, hosts=hosts, days=days, authority=signer)


def issue_to_key(public_key: LeafKey, *, name: str, authority: Identity, days: int = 365) -> x509.Certificate:
    """A tenant's certificate for a key that was made elsewhere. Arguments and errors as `issue` has them."""
    return _sign_tenant(public_key, name=name, signer=_load_authority(authority), days=days)


def create_self_signed(
    directory: Path, *, kind: Kind, name: str, hosts: Sequence[str] = (), days: int = 365
) -> Identity:
    """Like `issue` without an authority, for a certificate that its peer pins directly."""
    return _create(directory, kind=kind, name=name, hosts=hosts, days=days, authority=None)


def prepare_rotation(certificate: Path, *, authority: Identity | None, days: int = 365) -> Identity:
    """Makes the pair that `rotate` will put in place, as `<name>.next.pem` and `<name>.next.key`.

    So a provider's tenants can pin its next certificate while it still shows the present one. Arguments and errors as
    `rotate` has them; `CertificateError` if a next pair is there already.
    """
    key, new = _renewed(certificate, authority=authority, days=days)
    return _write_pair(certificate.parent, name=certificate.stem + _NEXT, certificate=new, key=key)


def rotate(certificate: Path, *, authority: Identity | None, days: int = 365) -> Identity:
    """Replaces a pair by the next one, or by a new one with the same subject, alternative names and key usage.

    The old pair stays as `<name>.previous.pem` and `<name>.previous.key`, in place of an older one. Each file
    is replaced atomically, the key first: whoever loads the pair in between gets a `CertificateError` about a
    mismatch and may retry. Rotation also repairs a pair whose key is lost.

    Args:
        certificate: `<name>.pem`, a provider's or a tenant's.
        authority: signs the new certificate; None for a self-signed one. Not used if a next pair is there.

    Raises `CertificateError` for an authority (create a second one instead) and for a missing authority.
    """
    upcoming = pair(certificate.parent, certificate.stem + _NEXT)
    prepared = upcoming.certificate.exists()
    if prepared:
        new = load_certificates(upcoming.certificate)[0]
        _require_usable(upcoming, new, fix=f"remove {upcoming.certificate} to make another")
        key_bytes = read_file(upcoming.key)
    else:
        key, new = _renewed(certificate, authority=authority, days=days)
        key_bytes = key_pem(key)

    old = load_certificates(certificate)[0]
    current = pair(certificate.parent, certificate.stem)
    previous = pair(certificate.parent, certificate.stem + _PREVIOUS)
    # If they do not fit, the key is lost, or an interrupted rotation has already kept the true pair.
    if _fits(current, old):
        replace_file(previous.key, read_file(current.key), mode=0o600)
        replace_file(previous.certificate, read_file(certificate), mode=0o644)
    replace_file(current.key, key_bytes, mode=0o600)
    replace_file(current.certificate, certificate_pem(new), mode=0o644)
    if prepared:
        upcoming.certificate.unlink()
        upcoming.key.unlink()
    return current


def _renewed(
    certificate: Path, *, authority: Identity | None, days: int
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    if certificate.suffix != ".pem":
        raise CertificateError(f"{certificate} is not named <name>.pem: pass the certificate, not its key")
    check_name(certificate.stem)
    old = load_certificates(certificate)[0]
    if kind_of(old) is None:
        raise CertificateError(
            f"{certificate} is neither a provider's nor a tenant's: to replace an authority, create a second "
            f"one and list both in the provider's tenant_authority file until every tenant has moved"
        )
    if authority is None and old.issuer != old.subject:
        raise CertificateError(f"{certificate} was issued by an authority: pass that authority to rotate it")
    key = ec.generate_private_key(ec.SECP256R1())
    new = _sign(
        old.subject,
        public_key=key.public_key(),
        extensions=[
            x509.SubjectAlternativeName(_alternative_names(old)),
            *_leaf_usage(x509.ExtendedKeyUsage(_usages(old))),
        ],
        days=days,
        signer=key if authority is None else _load_authority(authority),
    )
    return key, new


# Reading


def load_certificates(path: Path) -> list[x509.Certificate]:
    """All certificates of a PEM file, at least one. Raises `CertificateError`."""
    try:
        return x509.load_pem_x509_certificates(read_file(path))
    except ValueError as error:
        raise CertificateError(
            f"{path} holds no PEM certificate: expected a file made by `symbiosis-priv keys`"
        ) from error


def load_pin(path: Path) -> x509.Certificate:
    """The provider's certificate in a pinned file. Raises `CertificateError` unless it holds that and nothing else."""
    certificates = load_certificates(path)
    if len(certificates) > 1:
        raise CertificateError(
            f"{path} holds {len(certificates)} certificates, and a pinned file holds one: keep the provider's own. "
            f"While it rotates, name the file of its new one as next_certificate"
        )
    if kind_of(certificates[0]) is not Kind.PROVIDER:
        raise CertificateError(f"{path} is no provider certificate: pin the one that its operator gave you")
    return certificates[0]


def fingerprint(certificate: Path | bytes) -> str:
    """`sha256:<hex>` of the DER encoding: of the first certificate in a PEM file, or of DER bytes."""
    der = certificate if isinstance(certificate, bytes) else _der(load_certificates(certificate)[0])
    return f"sha256:{hashlib.sha256(der).hexdigest()}"


def key_fingerprint(certificate: x509.Certificate | x509.CertificateSigningRequest) -> str:
    """`sha256:<hex>` of the public key (its SubjectPublicKeyInfo): the same in every certificate for that key."""
    spki = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return f"sha256:{hashlib.sha256(spki).hexdigest()}"


def describe(path: Path) -> Description:
    """Describes the first certificate of a PEM file."""
    certificate = load_certificates(path)[0]
    return Description(
        subject=certificate.subject.rfc4514_string(),
        kind="authority" if is_authority(certificate) else kind_of(certificate) or "other",
        hosts=_hosts(certificate),
        not_after=certificate.not_valid_after_utc,
        fingerprint=fingerprint(_der(certificate)),
    )


def kind_of(certificate: x509.Certificate) -> Kind | None:
    """Which side of a connection the certificate is for; None for an authority or a stranger."""
    if tenant_name(certificate) is not None:
        return Kind.TENANT
    is_server = ExtendedKeyUsageOID.SERVER_AUTH in _usages(certificate) and not is_authority(certificate)
    return Kind.PROVIDER if is_server and _hosts(certificate) else None


def tenant_name(certificate: x509.Certificate) -> str | None:
    """The tenant a certificate speaks for; None unless it is a tenant's.

    The caller vouches for the signature: this only reads the names that the authority signed.
    """
    if is_authority(certificate) or ExtendedKeyUsageOID.CLIENT_AUTH not in _usages(certificate):
        return None
    names = _alternative_names(certificate)
    uris = [name.value for name in names if isinstance(name, x509.UniformResourceIdentifier)]
    if len(uris) != 1 or not uris[0].startswith(_TENANT_URN):
        return None
    name = uris[0].removeprefix(_TENANT_URN)
    return name if _NAME.fullmatch(name) else None


def is_authority(certificate: x509.Certificate) -> bool:
    """Whether the certificate may sign others."""
    constraints = _extension(certificate, x509.BasicConstraints)
    return constraints is not None and constraints.ca


def is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether the issuer's key has signed the certificate. Neither lifetime nor purpose is looked at."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, UnsupportedAlgorithm, TypeError, ValueError):
        return False
    return True


def is_current(certificate: x509.Certificate) -> bool:
    """Whether now lies within the certificate's lifetime."""
    return certificate.not_valid_before_utc <= _now() <= certificate.not_valid_after_utc


def require_identity(identity: Identity, *, kind: Kind) -> None:
    """Raises `CertificateError` unless the pair is complete, of this kind, current, and its key fits."""
    certificate = load_certificates(identity.certificate)[0]
    found = kind_of(certificate)
    if found is not kind:
        raise CertificateError(
            f"{identity.certificate} is {'no' if found is None else f'a {found} certificate, not a'} {kind} "
            f"certificate: create one with `symbiosis-priv keys {'request' if kind is Kind.TENANT else kind}`"
        )
    _require_usable(identity, certificate, fix="run `symbiosis-priv keys rotate`")


# Warnings


def warn_of_exposed_key(key: Path) -> None:
    """Logs a warning, once, if others than the owner of a key may read or write its file."""
    if os.name == "posix" and key.exists() and (mode := stat.S_IMODE(key.stat().st_mode)) & 0o077:
        _warn_once(f"{key} is open to other users of this machine (mode {mode:03o}): chmod 600 {key}")


def warn_of_expiry(path: Path, *, fix: str) -> None:
    """Logs a warning, once a day, for every certificate of a file that expires within 14 days."""
    for certificate in load_certificates(path):
        until = certificate.not_valid_after_utc
        left = until - _now()
        if timedelta() <= left < _SOON:
            _warn_once(f"{path} expires in {left.days} days, on {until:%Y-%m-%d %H:%M} UTC: {fix}")


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)


# Building


def _create(
    directory: Path, *, kind: Kind, name: str, hosts: Sequence[str], days: int, authority: _Authority | None
) -> Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    if kind is Kind.TENANT:
        if hosts:
            raise ConfigError(f"hosts={list(hosts)}: a tenant's certificate names no hosts, leave them out")
        certificate = _sign_tenant(key.public_key(), name=name, signer=authority or key, days=days)
    else:
        certificate = _sign(
            subject(name, unit=kind),
            public_key=key.public_key(),
            extensions=[
                x509.SubjectAlternativeName([_host(host) for host in hosts or DEFAULT_HOSTS]),
                *_leaf_usage(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])),
            ],
            days=days,
            signer=authority or key,
        )
    return _write_pair(directory, name=name, certificate=certificate, key=key)


def _sign_tenant(
    public_key: LeafKey, *, name: str, signer: _Authority | ec.EllipticCurvePrivateKey, days: int
) -> x509.Certificate:
    return _sign(
        subject(name, unit=Kind.TENANT),
        public_key=public_key,
        extensions=[
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(_TENANT_URN + name)]),
            *_leaf_usage(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])),
        ],
        days=days,
        signer=signer,
    )


def _sign(
    who: x509.Name,
    *,
    public_key: LeafKey,
    extensions: Sequence[x509.ExtensionType],
    days: int,
    signer: _Authority | ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """`signer` is the certificate's own private key where it is self-signed."""
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError(f"days={days}: choose a lifetime from 1 to {MAX_DAYS} days")
    not_after = _now() + timedelta(days=days)
    if isinstance(signer, _Authority):
        not_after = min(not_after, signer.certificate.not_valid_after_utc)
        issuer, signing_key = signer.certificate.subject, signer.key
    else:
        issuer, signing_key = who, signer
    builder = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _CLOCK_SKEW)
        .not_valid_after(not_after)
        # The key identifiers tell an old and a new certificate with one subject apart (rotation).
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
    )
    for extension in extensions:
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signing_key, hashes.SHA256())


def _leaf_usage(usage: x509.ExtendedKeyUsage) -> list[x509.ExtensionType]:
    signing = x509.KeyUsage(
        digital_signature=True,  # all that TLS 1.3 asks of a certificate
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return [x509.BasicConstraints(ca=False, path_length=None), signing, usage]


def subject(name: str, *, unit: str) -> x509.Name:
    """The subject of whoever is called that."""
    # The unit keeps an authority apart from a certificate of that name, which would look self-issued.
    check_name(name)
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "symbiosis-priv"),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def check_name(name: str) -> None:
    """Raises `ConfigError` for what cannot be the name of files and of a tenant."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name {name!r}: use 1 to 64 of A-Z a-z 0-9 . _ and -, not starting with a dot")
    if name.endswith((_PREVIOUS, _NEXT)):
        raise ConfigError(f"name {name!r}: rotation keeps other pairs under that ending, choose another name")


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if len(host) > 253 or not _DNS_NAME.fullmatch(host):
            raise ConfigError(
                f"host {host!r}: use a DNS name or an IP address, without scheme, port or wildcard"
            ) from None
        return x509.DNSName(host)


def _load_authority(identity: Identity) -> _Authority:
    certificate = load_certificates(identity.certificate)[0]
    fix = "create an authority with `symbiosis-priv keys authority`"
    if not is_authority(certificate):
        raise CertificateError(f"{identity.certificate} is no authority: {fix}")
    key = _require_usable(identity, certificate, fix=fix)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{identity.key} is no elliptic-curve key: {fix}")
    return _Authority(certificate=certificate, key=key)


def _require_usable(identity: Identity, certificate: x509.Certificate, *, fix: str) -> PrivateKeyTypes:
    if not is_current(certificate):
        raise CertificateError(
            f"{identity.certificate} is valid only from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} to "
            f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: check the clock, or {fix}"
        )
    key = identity.private_key()
    if key.public_key() != certificate.public_key():
        raise CertificateError(f"{identity.key} is not the key of {identity.certificate}: restore it, or {fix}")
    return key


def _fits(identity: Identity, certificate: x509.Certificate) -> bool:
    try:
        return identity.private_key().public_key() == certificate.public_key()
    except CertificateError:
        return False


def _usages(certificate: x509.Certificate) -> list[x509.ObjectIdentifier]:
    return list(_extension(certificate, x509.ExtendedKeyUsage) or ())


def _alternative_names(certificate: x509.Certificate) -> list[x509.GeneralName]:
    return list(_extension(certificate, x509.SubjectAlternativeName) or ())


def _hosts(certificate: x509.Certificate) -> tuple[str, ...]:
    names = _alternative_names(certificate)
    return tuple(str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress))


def _extension(certificate: x509.Certificate, kind: type[_Extension]) -> _Extension | None:
    """The extension; None if it is absent or malformed, so that a strange certificate has no kind."""
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return None


def _now() -> datetime:
    return datetime.now(UTC)


# Files


def pair(directory: Path, name: str) -> Identity:
    """`<name>.pem` and `<name>.key` in a folder."""
    return Identity(certificate=directory / f"{name}.pem", key=directory / f"{name}.key")


def _write_pair(
    directory: Path, *, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> Identity:
    identity = pair(directory, name)
    make_folder(directory)
    create_file(identity.key, key_pem(key), mode=0o600)
    try:
        create_file(identity.certificate, certificate_pem(certificate), mode=0o644)
    except BaseException:
        identity.key.unlink()  # ours, created just above: no half pairs
        raise
    return identity


def _der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)
