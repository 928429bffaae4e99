"""The signed descriptor of an executor: its address, the layers that it serves, and its time of expiry.

Theory of operation. The executor signs its descriptor with the key of its certificate, which an authority of the
federation has issued. The certificate is part of the descriptor. Name, operator and hosts are read from the
certificate only, because the authority has signed them there.

    body        msgpack of the descriptor, in canonical form
    signature   over a domain and the body, by the certificate's key

The domain separates the signature from all other signatures of the key, such as TLS handshakes. No reader trusts the
registry, which can only withhold a descriptor, or show an older one that has not expired.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Self

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding

from symbiosis_priv.certificates import reading
from symbiosis_priv.certificates.reading import is_authority, is_current, is_issued_by, load_certificates, provider_name
from symbiosis_priv.certificates.revocation import load_revoked, mark_of
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.errors import CertificateError, ConfigError, DescriptorError
from symbiosis_priv.limits import WeightBits
from symbiosis_priv.network.addresses import shown


@dataclass(frozen=True)
class Trust:
    """The authorities of a federation (several while one replaces another), and the marks of revoked certificates."""

    authorities: tuple[x509.Certificate, ...]
    revoked: frozenset[str] = frozenset()

    @classmethod
    def load(cls, authority: Path, revoked: Path | None = None, *, known: frozenset[str] = frozenset()) -> Self:
        """Read a PEM file of CA certificates and a list that `symbiosis-priv keys revoke` has written. Marks in `known`
        stay revoked. Raises `CertificateError`: a file cannot be read, or `authority` holds no CA certificate."""
        found = tuple(certificate for certificate in load_certificates(authority) if is_authority(certificate))
        if not found:
            raise CertificateError(
                f"{authority} holds no CA certificate: the operator of the federation makes one with `symbiosis-priv "
                f"keys authority --name federation`, and gives its certificate to all members"
            )
        reading.warn_of_expiry(authority, fix=lambda: "add the one that follows it, from the owner of this authority")
        return cls(found, load_revoked(revoked, known=known))

    def check(self, certificate: x509.Certificate, *, at: datetime) -> None:
        """Check that an authority has issued a provider's certificate, that both were valid at a time, and that the
        certificate was not revoked. Raises `DescriptorError`."""
        issuers = [authority for authority in self.authorities if is_issued_by(certificate, authority)]
        if not issuers:
            raise DescriptorError("its certificate is not one that the federation's authority has issued")
        if provider_name(certificate) is None:
            raise DescriptorError("its certificate is not a provider's")
        if not any(is_current(c, at) for c in issuers) or not is_current(certificate, at):
            raise DescriptorError("its certificate, or the authority's, is not valid then")
        if mark_of(certificate) in self.revoked:
            raise DescriptorError("its certificate has been revoked")


MAX_BYTES: Final = 4096  # size limit of a signed descriptor
MAX_CERTIFICATE: Final = 2048  # size limit of the certificate in a descriptor, in bytes of DER
MAX_LIFETIME_S: Final = 86_400
MAX_LAYERS: Final = 1 << 16
CLOCK_TOLERANCE_S: Final = 60  # largest accepted difference between two parties' clocks
MEMORY_S: Final = MAX_LIFETIME_S + 2 * CLOCK_TOLERANCE_S
"""A reader remembers a descriptor for this time after its issue. After that, no older one of its key is valid."""
MS: Final = 1000

_MAX_SIGNATURE: Final = 160  # bytes, above the largest DER signature of ECDSA over P-521
_DOMAIN: Final = b"symbiosis-priv descriptor 1\0"

Digest = Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$")]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]  # milliseconds since 1970, UTC
_Layer = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LAYERS)]


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of an executor. If a key has signed several descriptors, the one issued last counts. The host is
    exactly as the certificate (DER) names it. An executor that is `draining` is about to stop and takes no new work."""

    issued: Milliseconds
    certificate: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_CERTIFICATE)]
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    model_digest: Digest
    weight_bits: WeightBits
    first_layer: _Layer
    last_layer: _Layer
    capacity: float = 1.0  # what release 0.5.0 expects to read; nobody else reads it
    expires: Milliseconds
    draining: bool

    def __post_init__(self) -> None:
        if self.first_layer > self.last_layer:
            raise ValueError("its first layer comes after its last")
        if not 0 < self.expires - self.issued <= MS * MAX_LIFETIME_S:
            raise ValueError(f"its lifetime is not between 0 and {MAX_LIFETIME_S} seconds")

    @property
    def layers(self) -> LayerRange:
        return LayerRange(self.first_layer, self.last_layer)

    @property
    def address(self) -> str:
        return shown(self.host, self.port)


class _Signed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(max_length=_MAX_SIGNATURE)]


@dataclass(frozen=True)
class VerifiedDescriptor:
    """A descriptor that has passed `verify`, with what its certificate names."""

    descriptor: Descriptor
    certificate: x509.Certificate
    name: str
    operator: str
    key: str  # `key_fingerprint` of the executor's public key
    data: bytes  # the signed bytes
    digest: bytes  # SHA-256 of the signed body

    @property
    def age(self) -> tuple[int, bytes]:
        """Sort key for the descriptors of one key, newest last. The digest orders descriptors of one millisecond."""
        return self.descriptor.issued, self.digest


def describe(
    identity: reading.Identity,
    *,
    address: tuple[str, int],
    model_digest: str,
    weight_bits: int,
    layers: LayerRange,
    issued: int,
    lifetime_s: float,
    draining: bool = False,
) -> bytes:
    """Makes the signed descriptor of an executor with a certificate of the federation's authority. `issued` is in ms
    since 1970. Raises `CertificateError`: the files cannot be used; `ConfigError`: a value is out of bounds."""
    host, port = address
    fields = {
        "issued": issued,
        "certificate": reading.load_certificates(identity.certificate)[0].public_bytes(Encoding.DER),
        "host": host,
        "port": port,
        "model_digest": model_digest,
        "weight_bits": weight_bits,
        "first_layer": layers.first,
        "last_layer": layers.last,
        "expires": issued + round(MS * lifetime_s),
        "draining": draining,
    }
    try:
        descriptor = msgspec.convert(fields, Descriptor)
    except msgspec.ValidationError as error:
        raise ConfigError(f"this executor cannot be announced: {error}") from error
    return sign(descriptor, identity.private_key())


def sign(descriptor: Descriptor, key: PrivateKeyTypes) -> bytes:
    """Sign a descriptor with the key of its certificate. Raises `CertificateError`: not an elliptic-curve
    key; `ConfigError`: the signed descriptor is too large."""
    body = _encoder.encode(descriptor)
    signature = reading.sign(key, _DOMAIN + body)
    data = _encoder.encode(_Signed(body=body, signature=signature))
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"the descriptor has {len(data)} bytes, at most {MAX_BYTES} are allowed: get a certificate with fewer hosts"
        )
    return data


def verify(data: bytes, trust: Trust, *, now: float) -> VerifiedDescriptor:
    """Checks size, canonical form, certificate, signature, operator, host and times of an untrusted descriptor at
    `now`, in seconds since 1970. Raises `DescriptorError`: the message names the failed check, and quotes no data."""
    try:
        if len(data) > MAX_BYTES:
            raise DescriptorError("it is too large")
        signed = _signed_decoder.decode(data)
        descriptor = _decoder.decode(signed.body)
        if _encoder.encode(descriptor) != signed.body or _encoder.encode(signed) != data:
            raise DescriptorError("it is not in canonical form")
        certificate = x509.load_der_x509_certificate(descriptor.certificate)
        trust.check(certificate, at=datetime.fromtimestamp(now, UTC))
        key = certificate.public_key()
    except _MALFORMED as error:
        raise DescriptorError(f"it is malformed ({type(error).__name__})") from error
    if not reading.is_signed(key, _DOMAIN + signed.body, signed.signature):
        raise DescriptorError("it is not signed by the key of its certificate")
    name, operator = provider_name(certificate), reading.operator_of(certificate)
    if name is None or operator is None:
        raise DescriptorError("its certificate names no operator (`symbiosis-priv keys sign --operator`)")
    if descriptor.host not in reading.hosts_of(certificate):
        raise DescriptorError("it claims a host that its certificate does not name")
    if descriptor.issued / MS > now + CLOCK_TOLERANCE_S:
        raise DescriptorError("it comes from the future: compare the clocks")
    if descriptor.expires / MS < now - CLOCK_TOLERANCE_S:
        raise DescriptorError("it has expired: compare the clocks if it is new")
    fingerprint, digest = reading.key_fingerprint(certificate), hashlib.sha256(signed.body).digest()
    return VerifiedDescriptor(descriptor, certificate, name, operator, fingerprint, data, digest)


def verify_all(listed: Iterable[bytes], trust: Trust, *, now: float) -> tuple[list[VerifiedDescriptor], Counter[str]]:
    """Verify the descriptors that a registry lists. Returns the valid ones, and counts refused ones by reason."""
    found, refused = [], Counter[str]()
    for data in listed:
        try:
            found.append(verify(data, trust, now=now))
        except DescriptorError as error:
            refused[str(error)] += 1
    return found, refused


# The errors that msgspec, x509 and datetime raise for malformed bytes and numbers.
_MALFORMED = (
    *(msgspec.DecodeError, UnsupportedAlgorithm, x509.InvalidVersion),
    *(ValueError, TypeError, OverflowError, OSError, RecursionError),
)
_encoder = msgspec.msgpack.Encoder()
_signed_decoder = msgspec.msgpack.Decoder(_Signed)
_decoder = msgspec.msgpack.Decoder(Descriptor)
