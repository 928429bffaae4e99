"""Signed statements: whoever passes them on, their readers know who said what, and when.

Theory of operation. A statement is signed with the key of a provider's or a registry's own certificate, and that
certificate by an authority that the readers pin. The certificate is part of the statement. Who is speaking, and who
runs it, is read from there, where the authority vouches for it; statements have no fields for that, so that none can
contradict.

    body        msgpack of the statement, in the one form that its encoder gives
    signature   over the domain of its kind and the body, by the certificate's key

Every kind of statement has a domain of its own: none can be passed off as another one, nor as anything that the key
signs in a TLS handshake.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Generic, Self, TypeVar

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes

from symbiosis_priv.certificates import (
    is_authority,
    is_issued_by,
    key_fingerprint,
    load_certificates,
    operator_of,
    provider_name,
)
from symbiosis_priv.certificates.revocation import load_revoked, mark_of
from symbiosis_priv.errors import CertificateError, ConfigError, DescriptorError

MAX_BYTES: Final = 4096
"""Of a signed statement."""
MAX_CERTIFICATE: Final = 2048
CLOCK_TOLERANCE_S: Final = 60
"""By how much two parties' clocks may differ."""
MS: Final = 1000

_MAX_SIGNATURE: Final = 160  # bytes: the most of ECDSA over P-521, in DER
_ECDSA: Final = ec.ECDSA(hashes.SHA256())

Milliseconds = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""Since 1970, UTC."""


class Statement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what is signed.

    Args:
        issued: when it was said.
        certificate: the speaker's own, DER.
    """

    issued: Milliseconds
    certificate: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_CERTIFICATE)]


_S = TypeVar("_S", bound=Statement)
_S_co = TypeVar("_S_co", bound=Statement, covariant=True)


class _Signed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(max_length=_MAX_SIGNATURE)]


@dataclass(frozen=True)
class Trust:
    """Who vouches for providers and registries, and whom they do not vouch for any more.

    Args:
        authorities: several while one replaces another.
        revoked: marks of certificates, see `revocation`.
    """

    authorities: tuple[x509.Certificate, ...]
    revoked: frozenset[str] = frozenset()

    @classmethod
    def load(cls, authority: Path, revoked: Path | None = None, *, known: frozenset[str] = frozenset()) -> Self:
        """Read the files.

        Args:
            authority: certificates.
            revoked: a list of marks.
            known: see `load_revoked`.

        Raises:
            CertificateError: one of them cannot be read, or there is no authority in the first.
        """
        found = tuple(certificate for certificate in load_certificates(authority) if is_authority(certificate))
        if not found:
            raise CertificateError(
                f"{authority} holds no authority: whoever runs the federation makes one with `symbiosis-priv keys "
                f"authority --name federation`, and gives its certificate to everybody"
            )
        return cls(found, load_revoked(revoked, known=known))

    @property
    def of_the_past(self) -> Trust:
        """For what was said before somebody was revoked."""
        return Trust(self.authorities)

    def check(self, certificate: x509.Certificate, *, at: datetime) -> None:
        """Raises `DescriptorError` unless one of the authorities vouches for a provider's certificate then."""
        issuers = [authority for authority in self.authorities if is_issued_by(certificate, authority)]
        if not issuers:
            raise DescriptorError("its certificate is not one that the federation's authority has issued")
        if provider_name(certificate) is None:
            raise DescriptorError("its certificate is no provider's")
        if not any(_is_valid(c, at) for c in issuers) or not _is_valid(certificate, at):
            raise DescriptorError("its certificate, or the authority's, is not valid then")
        if mark_of(certificate) in self.revoked:
            raise DescriptorError("its certificate has been revoked")


@dataclass(frozen=True)
class Vouched(Generic[_S_co]):
    """A statement whose signature and certificate have been checked.

    Args:
        said: the statement.
        certificate: the speaker's, that an authority vouches for.
        data: the signed statement, to be passed on.
        digest: SHA-256 of what was signed.
    """

    said: _S_co
    certificate: x509.Certificate
    data: bytes
    digest: bytes

    @cached_property
    def key(self) -> str:
        """`key_fingerprint` of the speaker's public key."""
        return key_fingerprint(self.certificate)

    @cached_property
    def name(self) -> str:
        """The speaker's, as the authority vouches."""
        return provider_name(self.certificate) or ""

    @cached_property
    def operator(self) -> str:
        """Who runs the speaker, as the authority vouches; empty if it does not."""
        return operator_of(self.certificate) or ""

    @property
    def age(self) -> tuple[int, bytes]:
        """Of two statements of one key the greater one counts; the digest decides between two of one moment."""
        return self.said.issued, self.digest


def sign(statement: Statement, key: PrivateKeyTypes, *, domain: bytes) -> bytes:
    """A statement, signed with the key of its certificate.

    Raises:
        CertificateError: the key is neither elliptic-curve nor Ed25519.
        ConfigError: it is too large.
    """
    body = _encoder.encode(statement)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        signature = key.sign(_signed(domain, body), _ECDSA)
    elif isinstance(key, ed25519.Ed25519PrivateKey):
        signature = key.sign(_signed(domain, body))
    else:
        raise CertificateError("the key is neither elliptic-curve nor Ed25519: make one with `keys request --provider`")
    data = _encoder.encode(_Signed(body=body, signature=signature))
    if len(data) > MAX_BYTES:
        raise ConfigError(f"a statement of {len(data)} bytes; at most {MAX_BYTES}: its certificate names fewer hosts")
    return data


def verify(
    data: bytes, kind: msgspec.msgpack.Decoder[_S], *, domain: bytes, trust: Trust, now: float | None
) -> Vouched[_S]:
    """What makes a statement believable, whoever has passed it on.

    Args:
        data: from anywhere.
        kind: of statement.
        domain: of its kind.
        trust: who vouches for its speaker.
        now: seconds since 1970; None for a statement of the past, as it was when it was made.

    Raises:
        DescriptorError: says what is wrong. The message quotes nothing that was received.
    """
    try:
        if len(data) > MAX_BYTES:
            raise DescriptorError("it is too large")
        signed = _signed_decoder.decode(data)
        said = kind.decode(signed.body)
        if _encoder.encode(said) != signed.body or _encoder.encode(signed) != data:
            raise DescriptorError("it is not in canonical form")
        certificate = x509.load_der_x509_certificate(said.certificate)
        moment = said.issued / MS if now is None else now
        trust.check(certificate, at=datetime.fromtimestamp(moment, UTC))
        key = certificate.public_key()
    except _MALFORMED as error:
        raise DescriptorError(f"it is malformed ({type(error).__name__})") from error
    if not _is_signed(signed, key=key, domain=domain):
        raise DescriptorError("it is not signed by the key of its certificate")
    if said.issued / MS > moment + CLOCK_TOLERANCE_S:
        raise DescriptorError("it comes from the future: compare the clocks")
    return Vouched(said, certificate, data, hashlib.sha256(signed.body).digest())


def _is_signed(signed: _Signed, *, key: PublicKeyTypes, domain: bytes) -> bool:
    message = _signed(domain, signed.body)
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signed.signature, message, _ECDSA)
        elif isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signed.signature, message)
        else:
            return False
    except InvalidSignature:
        return False
    return True


def _signed(domain: bytes, body: bytes) -> bytes:
    assert b"\0" not in domain, "no domain may be the beginning of another one"
    return b"symbiosis-priv " + domain + b"\0" + body


def _is_valid(certificate: x509.Certificate, at: datetime) -> bool:
    return certificate.not_valid_before_utc <= at <= certificate.not_valid_after_utc


# What msgspec, x509 and datetime raise for bytes and numbers that are none.
_MALFORMED = (
    msgspec.DecodeError,
    ValueError,
    TypeError,
    OverflowError,
    OSError,
    RecursionError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
)
_encoder = msgspec.msgpack.Encoder()
_signed_decoder = msgspec.msgpack.Decoder(_Signed)
