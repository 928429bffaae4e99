"""Signatures by the key of a certificate: ECDSA with SHA-256, or Ed25519."""

from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes

from symbiosis_priv.errors import CertificateError

_ECDSA: Final = ec.ECDSA(hashes.SHA256())


def sign(key: PrivateKeyTypes, message: bytes) -> bytes:
    """Sign a message, which begins with the domain of its kind. Raises `CertificateError`: the key is neither
    elliptic-curve nor Ed25519."""
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(message, _ECDSA)
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(message)
    raise CertificateError("the key is neither elliptic-curve nor Ed25519: make one with `keys request --provider`")


def is_signed(key: PublicKeyTypes, message: bytes, signature: bytes) -> bool:
    """Returns True if the signature of the message is by this key. False also for a key of another kind."""
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, message, _ECDSA)
        elif isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, message)
        else:
            return False
    except InvalidSignature:
        return False
    return True
