"""A second valid certificate for a key, made without the issuer: if (r, s) is an ECDSA signature, so is (r, n - s).

The holder of a certificate that an elliptic-curve authority has signed can replace the signature by the other one.
Every verifier accepts the result, and its fingerprint differs. Code that identifies certificates by their fingerprint
treats it as an unknown certificate.
"""

from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding

from symbiosis_priv.certificates.reading import Identity, load_certificates

_SEQUENCE, _BIT_STRING = 0x30, 0x03
_LONG = 0x80  # DER encodes lengths of at least this value in additional bytes


def twin(certificate: x509.Certificate, *, curve: ec.EllipticCurve) -> x509.Certificate:
    """The same certificate with the second valid signature of its issuer, (r, n - s) in place of (r, s).

    Args:
        curve: curve of the issuer's key.
    """
    whole, signed = certificate.public_bytes(Encoding.DER), certificate.tbs_certificate_bytes
    signature = certificate.signature
    algorithm = whole[whole.index(signed) + len(signed) : -len(_tlv(_BIT_STRING, b"\0" + signature))]
    r, s = decode_dss_signature(signature)
    other = _tlv(_BIT_STRING, b"\0" + encode_dss_signature(r, curve.group_order - s))
    return x509.load_der_x509_certificate(_tlv(_SEQUENCE, signed + algorithm + other))


def twin_of(identity: Identity, folder: Path) -> Identity:
    """An identity with the same key and the twin of its certificate. The issuer's key is on P-256."""
    certificate = twin(load_certificates(identity.certificate)[0], curve=ec.SECP256R1())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / identity.certificate.name
    path.write_bytes(certificate.public_bytes(Encoding.PEM))
    return Identity(path, identity.key)


def _tlv(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < _LONG:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes([tag, _LONG | len(length)]) + length + content
