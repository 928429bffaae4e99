"""What an executor says of itself, signed: where it is, which layers of which model it serves, and until when.

Theory of operation. A registry passes descriptors on, and nobody believes it: each is signed with the key of the
executor's own certificate, and that certificate by the authority of the federation, which its readers pin. The
certificate is part of the descriptor. Who the executor is, who runs it and on which hosts it may be reached are read
from there, where the authority vouches for them; the descriptor has no fields for them, so none can contradict.

    body        msgpack of `Descriptor`, in the one form that its encoder gives
    signature   over a domain of its own and the body, by the certificate's key

What a registry can do is to hold a descriptor back, or to show an older one that has not expired. A reader remembers
the newest of each key, so an older one does not come back; asks several registries, and takes the newest; and a
descriptor lives for minutes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Self

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding

from symbiosis_priv.certificates import (
    fingerprint,
    hosts_of,
    is_authority,
    is_issued_by,
    key_fingerprint,
    load_certificates,
    operator_of,
    provider_name,
)
from symbiosis_priv.certificates.signing import MAX_SIGNATURE, is_signed, sign_statement
from symbiosis_priv.errors import CertificateError, ConfigError, DescriptorError
from symbiosis_priv.layers import LayerRange
from symbiosis_priv.limits import MAX_WEIGHT_BITS, MIN_WEIGHT_BITS
from symbiosis_priv.revocation import load_revoked

MAX_BYTES: Final = 4096
"""Of a signed descriptor."""
MAX_LIFETIME_S: Final = 86_400
CLOCK_TOLERANCE_S: Final = 60
"""By how much two parties' clocks may differ."""
MAX_LAYERS: Final = 1 << 16
MAX_CERTIFICATE: Final = 2048

_DOMAIN: Final = b"descriptor 1"
_MS: Final = 1000

Milliseconds = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""Since 1970, UTC."""
Digest = Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$")]
_Layer = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LAYERS)]


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An executor in its own words.

    Args:
        host: where it listens: one of the hosts of its certificate, spelled as there.
        port: likewise.
        model_digest: of the whole model.
        weight_bits: of its weights.
        first_layer: that it serves.
        last_layer: that it serves, included.
        capacity: what it can do, relative to others.
        issued: when this was said; of two descriptors of one key the later one counts.
        expires: when it is not true any more unless it is said again.
        draining: it is about to leave: nobody should begin anything there.
        certificate: its own, DER.
    """

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    model_digest: Digest
    weight_bits: Annotated[int, msgspec.Meta(ge=MIN_WEIGHT_BITS, le=MAX_WEIGHT_BITS)]
    first_layer: _Layer
    last_layer: _Layer
    capacity: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    issued: Milliseconds
    expires: Milliseconds
    draining: bool
    certificate: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_CERTIFICATE)]

    def __post_init__(self) -> None:
        if self.first_layer > self.last_layer:
            raise ValueError("its first layer comes after its last")
        if not 0 < self.expires - self.issued <= _MS * MAX_LIFETIME_S:
            raise ValueError(f"it does not live for up to {MAX_LIFETIME_S} seconds")

    @property
    def layers(self) -> LayerRange:
        """What it serves."""
        return LayerRange(self.first_layer, self.last_layer)


class _Signed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(max_length=MAX_SIGNATURE)]


@dataclass(frozen=True)
class Trust:
    """Who vouches for executors and registries, and whom they do not vouch for any more.

    Args:
        authorities: several while one replaces another.
        revoked: fingerprints of certificates.
    """

    authorities: tuple[x509.Certificate, ...]
    revoked: frozenset[str] = frozenset()

    @classmethod
    def load(cls, authority: Path, revoked: Path | None = None) -> Self:
        """Read the files.

        Raises:
            CertificateError: one of them cannot be read, or there is no authority in the first.
        """
        found = tuple(certificate for certificate in load_certificates(authority) if is_authority(certificate))
        if not found:
            raise CertificateError(
                f"{authority} holds no authority: whoever runs the federation makes one with `symbiosis-priv keys "
                f"authority --name federation`, and gives its certificate to everybody"
            )
        return cls(found, frozenset() if revoked is None else load_revoked(revoked))

    def check(self, certificate: x509.Certificate, *, at: datetime) -> None:
        """Raises `DescriptorError` unless one of the authorities vouches for a provider's certificate then."""
        issuers = [authority for authority in self.authorities if is_issued_by(certificate, authority)]
        if not issuers:
            raise DescriptorError("its certificate is not one that the federation's authority has issued")
        if provider_name(certificate) is None:
            raise DescriptorError("its certificate is no provider's")
        if not any(_is_valid(c, at) for c in issuers) or not _is_valid(certificate, at):
            raise DescriptorError("its certificate, or the authority's, is not valid then")
        if fingerprint(certificate.public_bytes(Encoding.DER)) in self.revoked:
            raise DescriptorError("its certificate has been revoked")


@dataclass(frozen=True)
class Vouched:
    """A descriptor that has passed `verify`.

    Args:
        said: by the executor.
        certificate: its own, that an authority vouches for.
        data: the signed descriptor, to be passed on.
        digest: SHA-256 of what was signed.
    """

    said: Descriptor
    certificate: x509.Certificate
    data: bytes
    digest: bytes

    @cached_property
    def key(self) -> str:
        """`key_fingerprint` of its public key: who it is."""
        return key_fingerprint(self.certificate)

    @cached_property
    def name(self) -> str:
        """As the authority vouches."""
        return provider_name(self.certificate) or ""

    @cached_property
    def operator(self) -> str:
        """As the authority vouches."""
        return operator_of(self.certificate) or ""

    @property
    def age(self) -> tuple[int, bytes]:
        """Of two descriptors of one key the greater one counts; the digest decides between two of one moment."""
        return self.said.issued, self.digest


def sign(descriptor: Descriptor, key: PrivateKeyTypes) -> bytes:
    """A descriptor, signed with the key of its certificate."""
    body = _encoder.encode(descriptor)
    data = _encoder.encode(_Signed(body=body, signature=sign_statement(key, body, domain=_DOMAIN)))
    if len(data) > MAX_BYTES:
        raise ConfigError(f"a descriptor of {len(data)} bytes; at most {MAX_BYTES}: its certificate names fewer hosts")
    return data


def verify(data: bytes, trust: Trust, *, now: float | None, after: tuple[int, bytes] | None = None) -> Vouched:
    """Everything that makes a descriptor believable, whoever has passed it on.

    Args:
        data: from anywhere.
        trust: who vouches for executors.
        now: seconds since 1970; None for a descriptor of the past, as it was when it was issued.
        after: the `age` of the newest one that is known of the same key, if the caller has seen one: an older one is
            a replay. The same one is none.

    Raises:
        DescriptorError: says what is wrong. The message quotes nothing that was received.
    """
    try:
        if len(data) > MAX_BYTES:
            raise DescriptorError("it is too large")
        signed = _signed_decoder.decode(data)
        said = _decoder.decode(signed.body)
        if _encoder.encode(said) != signed.body or _encoder.encode(signed) != data:
            raise DescriptorError("it is not in canonical form")
        certificate = x509.load_der_x509_certificate(said.certificate)
        moment = said.issued / _MS if now is None else now
        trust.check(certificate, at=datetime.fromtimestamp(moment, UTC))
        key = certificate.public_key()
    except _MALFORMED as error:
        raise DescriptorError(f"it is malformed ({type(error).__name__})") from error
    if not is_signed(signed.body, key=key, signature=signed.signature, domain=_DOMAIN):
        raise DescriptorError("it is not signed by the key of its certificate")
    if operator_of(certificate) is None:
        raise DescriptorError("its certificate does not say who runs it (`symbiosis-priv keys sign --operator`)")
    if said.host not in hosts_of(certificate):
        raise DescriptorError("it claims a host that its certificate does not name")
    if said.issued / _MS > moment + CLOCK_TOLERANCE_S:
        raise DescriptorError("it comes from the future: compare the clocks")
    if said.expires / _MS < moment - CLOCK_TOLERANCE_S:
        raise DescriptorError("it has expired: compare the clocks if it is new")
    vouched = Vouched(said, certificate, data, hashlib.sha256(signed.body).digest())
    if after is not None and vouched.age < after:
        raise DescriptorError("a newer one of the same key is known")
    return vouched


def newest(vouched: Iterable[Vouched]) -> dict[str, Vouched]:
    """The newest of each key, by key."""
    found: dict[str, Vouched] = {}
    for one in vouched:
        if one.key not in found or found[one.key].age < one.age:
            found[one.key] = one
    return found


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
_decoder = msgspec.msgpack.Decoder(Descriptor)
