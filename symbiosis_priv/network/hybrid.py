"""Seeds and effects under X25519 and ML-KEM-768 together, inside the TLS connection of a tenant and a helper.

Theory of operation. TLS agrees on its keys with X25519. Whoever records a connection today and has a quantum computer
later reads what TLS has carried. A seed tells a helper's share of every pad, and so does an effect: `e = n Wq^T` is
usually solvable for n. So the tenant and the helper agree on a second key, with an exchange that needs both problems
solved, and the connection carries seeds and effects under it only. Everything else that a provider sends or receives
is uniform to a party without the seeds (masked rows, their products).

    tenant -> helper   KeyShare    ML-KEM-768 encapsulation key | X25519 public key      1,216 bytes
    helper -> tenant   KeyAnswer   ML-KEM-768 ciphertext | X25519 public key             1,120 bytes

Both keys are made for the connection. The secrets are combined as in X-Wing (draft-connolly-cfrg-xwing-kem, the KEM
0x647A of HPKE): SHA3-256(ss_M | ss_X | ct_X | pk_X | label), which is pseudorandom while one of the two is. The
connection's key is HKDF-SHA256 of that, bound to both messages and to the Finished message of the TLS client, which
depends on both certificates and the whole handshake. `test_the_combiner_is_that_of_x_wing` compares with the HPKE of
`cryptography`.

A seed travels under AES-256-GCM and an effect under AES-256-CTR, each with a key of its own and the request's nonce,
which is fresh. The check of the product covers effects, and TLS authenticates every byte.
"""

import hashlib
import ssl
from typing import Final

import msgspec
import numpy as np
from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from symbiosis_priv.arithmetic.keystream import Seed, derive
from symbiosis_priv.errors import ConfigError, ProtocolError
from symbiosis_priv.network import wire

_LABEL: Final = b"\\.//^\\"  # a picture of an X-wing
_X25519_BYTES: Final = 32
_SLACK: Final = 15  # room that `update_into` may require
_PIECE: Final = 1 << 18  # bytes: they stay in the cache


class Sealing:
    """Seals seeds and effects of one connection, under its key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._seeds = AESGCM(derive(key, "seeds"))
        self._effects = algorithms.AES256(derive(key, "effects"))

    def seal(self, request: wire.Effect) -> wire.Effect:
        """The request as it is sent."""
        return msgspec.structs.replace(request, seed=Seed(self._seeds.encrypt(request.nonce, request.seed, None)))

    def opened(self, request: wire.Effect) -> wire.Effect:
        """The request as it was before `seal`. Raises `ProtocolError`: its seed is not sealed under this key."""
        try:
            return msgspec.structs.replace(request, seed=Seed(self._seeds.decrypt(request.nonce, request.seed, None)))
        except InvalidTag as error:
            raise ProtocolError("the seed is not sealed under this connection's key") from error

    def cover(self, nonce: bytes, payload: memoryview) -> memoryview:
        """The payload of an effect as it is sent, in new memory."""
        covered = np.empty(len(payload) + _SLACK, dtype=np.uint8).data
        Cipher(self._effects, modes.CTR(nonce)).encryptor().update_into(payload, covered)
        return covered[: len(payload)]

    def uncover(self, nonce: bytes, payload: bytearray | memoryview) -> None:
        """Turn the received payload of an effect into the effect, in place: piece by piece, because new memory for all
        of it would cost more than AES."""
        cipher, view = Cipher(self._effects, modes.CTR(nonce)).encryptor(), memoryview(payload)
        piece = np.empty(min(len(view), _PIECE) + _SLACK, dtype=np.uint8).data
        for start in range(0, len(view), _PIECE):
            part = view[start : start + _PIECE]
            cipher.update_into(part, piece)
            part[:] = piece[: len(part)]


class KeyOffer:
    """The tenant's half of the exchange. Raises `ConfigError` where the build of `cryptography` has no ML-KEM-768."""

    def __init__(self) -> None:
        self._kem, self._curve = _kem_key(), X25519PrivateKey.generate()
        self.message = wire.KeyShare(
            share=self._kem.public_key().public_bytes_raw() + self._curve.public_key().public_bytes_raw()
        )

    def sealing(self, answer: wire.KeyAnswer, connection: ssl.SSLObject | ssl.SSLSocket) -> Sealing:
        """The key that the helper has answered with. Raises `ProtocolError`: the answer holds no key."""
        ciphertext, theirs = answer.share[:-_X25519_BYTES], answer.share[-_X25519_BYTES:]
        try:
            kem_secret = self._kem.decapsulate(ciphertext)
            curve_secret = self._curve.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError as error:
            raise ProtocolError("the helper's key is not one of X25519 and ML-KEM-768") from error
        own = self.message.share[-_X25519_BYTES:]
        return _sealing(combine(kem_secret, curve_secret, theirs, own), self.message, answer, connection)


def answer_offer(offer: wire.KeyShare, connection: ssl.SSLObject | ssl.SSLSocket) -> tuple[wire.KeyAnswer, Sealing]:
    """The helper's half of the exchange. Raises `ProtocolError`: the offer holds no keys."""
    theirs = offer.share[-_X25519_BYTES:]
    curve = X25519PrivateKey.generate()
    try:
        kem_secret, ciphertext = MLKEM768PublicKey.from_public_bytes(offer.share[:-_X25519_BYTES]).encapsulate()
        curve_secret = curve.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError as error:
        raise ProtocolError("the keys are not those of X25519 and ML-KEM-768") from error
    own = curve.public_key().public_bytes_raw()
    answer = wire.KeyAnswer(share=ciphertext + own)
    return answer, _sealing(combine(kem_secret, curve_secret, own, theirs), offer, answer, connection)


def combine(kem_secret: bytes, curve_secret: bytes, curve_ciphertext: bytes, curve_public: bytes) -> bytes:
    """The combiner of X-Wing."""
    return hashlib.sha3_256(kem_secret + curve_secret + curve_ciphertext + curve_public + _LABEL).digest()


def connection_key(secret: bytes, offer: wire.KeyShare, answer: wire.KeyAnswer, finished: bytes) -> bytes:
    """The key of a connection from the combined secret."""
    transcript = hashlib.sha256(offer.share + answer.share).hexdigest()
    return derive(secret, "connection", transcript, finished.hex())


def require_hybrid(what: str) -> None:
    """Raises `ConfigError` if the build of `cryptography` has no ML-KEM-768, which `what` needs."""
    try:
        _kem_key()
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error


def _kem_key() -> MLKEM768PrivateKey:
    try:
        return MLKEM768PrivateKey.generate()
    except UnsupportedAlgorithm as error:
        raise ConfigError(
            "this build of `cryptography` has no ML-KEM-768, under which seeds are sent: install its wheel "
            "(pip install --only-binary cryptography 'cryptography>=48'), or one built with OpenSSL 3.5 or newer"
        ) from error


def _sealing(
    secret: bytes, offer: wire.KeyShare, answer: wire.KeyAnswer, connection: ssl.SSLObject | ssl.SSLSocket
) -> Sealing:
    finished = connection.get_channel_binding("tls-unique")
    if finished is None:
        raise ProtocolError("the connection has completed no TLS handshake")
    return Sealing(connection_key(secret, offer, answer, finished))
