"""Statements that are signed with the key of a certificate.

Every kind of statement has a domain of its own, which is signed with it: none can be passed off as another one, nor as
anything that the key signs in a TLS handshake.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes

from symbiosis_priv.errors import CertificateError

MAX_SIGNATURE = 160
"""Bytes: the most of ECDSA over P-521, in DER."""

_ECDSA = ec.ECDSA(hashes.SHA256())


def sign_statement(key: PrivateKeyTypes, statement: bytes, *, domain: bytes) -> bytes:
    """The signature. Raises `CertificateError` for a key that is neither elliptic-curve nor Ed25519."""
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(_signed(domain, statement), _ECDSA)
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(_signed(domain, statement))
    raise CertificateError("the key is neither elliptic-curve nor Ed25519: make one with `symbiosis-priv keys request`")


def is_signed(statement: bytes, *, key: PublicKeyTypes, signature: bytes, domain: bytes) -> bool:
    """Whether the key has signed this statement, in this domain."""
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, _signed(domain, statement), _ECDSA)
        elif isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, _signed(domain, statement))
        else:
            return False
    except InvalidSignature:
        return False
    return True


def _signed(domain: bytes, statement: bytes) -> bytes:
    assert b"\0" not in domain, "no domain may be the beginning of another one"
    return b"symbiosis-priv " + domain + b"\0" + statement
