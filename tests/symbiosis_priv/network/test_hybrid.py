"""Keys of X25519 and ML-KEM-768 together: the combiner is X-Wing's, and every part of the exchange decides the key."""

import hmac
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import example, given, strategies as st

from symbiosis_priv.arithmetic.keystream import Seed
from symbiosis_priv.errors import ConfigError, ProtocolError
from symbiosis_priv.network import hybrid, wire

nonces = st.binary(min_size=16, max_size=16)


def connection(finished: bytes = b"finished") -> Any:
    return SimpleNamespace(get_channel_binding=lambda kind: finished)


def effect(nonce: bytes, seed: bytes) -> wire.Effect:
    fields: dict[str, Any] = {"group": 1, "direction": "forward", "arithmetic": "ring", "rows": 3}
    return wire.Effect(nonce=nonce, seed=Seed(seed), first_row=0, **fields)


def agreed() -> tuple[hybrid.Sealing, hybrid.Sealing]:
    offer = hybrid.KeyOffer()
    answer, helper = hybrid.answer_offer(offer.message, connection())
    return offer.sealing(answer, connection()), helper


TENANT, HELPER = agreed()


@given(nonces, st.binary(min_size=32, max_size=32), st.binary(max_size=100))
@example(bytes(16), bytes(32), bytes(2 * hybrid._PIECE + 17))
def test_both_sides_open_what_the_other_seals(nonce: bytes, seed: bytes, payload: bytes) -> None:
    sent = TENANT.seal(effect(nonce, seed))
    assert len(sent.seed) == 32 + wire.TAG_BYTES
    assert sent.seed[:32] != seed
    assert wire.decode_request(wire.encode(sent)[wire.PREFIX.size :]) == sent
    assert HELPER.opened(sent) == effect(nonce, seed)
    received = bytearray(HELPER.cover(nonce, memoryview(payload)))
    TENANT.uncover(nonce, received)
    assert received == payload


@pytest.mark.parametrize("changed", ["nonce", "seed", "bare"])
def test_a_seed_under_another_key_or_nonce_is_refused(changed: str) -> None:
    sent = TENANT.seal(effect(bytes(16), bytes(32)))
    other = {"nonce": b"1" * 16} if changed == "nonce" else {"seed": sent.seed[:-1] + bytes([sent.seed[-1] ^ 1])}
    with pytest.raises(ProtocolError, match="not sealed"):
        HELPER.opened(effect(bytes(16), bytes(32)) if changed == "bare" else msgspec.structs.replace(sent, **other))


@pytest.mark.parametrize("part", ["kem offer", "curve offer", "kem answer", "curve answer", "handshake"])
def test_every_part_of_the_exchange_decides_the_key(part: str) -> None:
    """A party in the middle that replaces one part gets two sides that do not understand each other."""
    offer, other = hybrid.KeyOffer(), hybrid.KeyOffer()
    mine, theirs, finished = offer.message.share, other.message.share, b"finished"
    seen = {"kem offer": theirs[:1184] + mine[1184:], "curve offer": mine[:1184] + theirs[1184:]}.get(part, mine)
    answer, helper = hybrid.answer_offer(wire.KeyShare(share=seen), connection())
    third = hybrid.answer_offer(wire.KeyShare(share=seen), connection())[0].share
    share = {"kem answer": third[:1088] + answer.share[1088:], "curve answer": answer.share[:1088] + third[1088:]}
    tenant = offer.sealing(
        wire.KeyAnswer(share=share.get(part, answer.share)), connection(b"another" if part == "handshake" else finished)
    )
    with pytest.raises(ProtocolError, match="not sealed"):
        helper.opened(tenant.seal(effect(bytes(16), bytes(32))))


@pytest.mark.parametrize("share", [bytes(1216), b"\xff" * 1216], ids=["zeros", "ones"])
def test_shares_without_keys_are_refused(share: bytes) -> None:
    with pytest.raises(ProtocolError, match="X25519 and ML-KEM-768"):
        hybrid.answer_offer(wire.KeyShare(share=share), connection())
    with pytest.raises(ProtocolError, match="X25519 and ML-KEM-768"):
        hybrid.KeyOffer().sealing(wire.KeyAnswer(share=bytes(1120)), connection())


def test_the_combiner_is_that_of_x_wing() -> None:
    """`cryptography` has X-Wing as a KEM of HPKE: we open what it has encrypted, with our combiner and RFC 9180's key
    schedule (base mode, HKDF-SHA256, AES-256-GCM)."""
    kem, curve = MLKEM768PrivateKey.generate(), X25519PrivateKey.generate()
    public = hpke.MLKEM768X25519PublicKey(kem.public_key(), curve.public_key())
    suite = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
    message = suite.encrypt(b"rows", cast(Any, public), info=b"info")
    ciphertext, theirs, sealed = message[:1088], message[1088:1120], message[1120:]
    curve_secret = curve.exchange(X25519PublicKey.from_public_bytes(theirs))
    own = curve.public_key().public_bytes_raw()
    secret = hybrid.combine(kem.decapsulate(ciphertext), curve_secret, theirs, own)

    def extract(salt: bytes, label: bytes, ikm: bytes) -> bytes:
        return hmac.digest(salt, b"HPKE-v1" + suite_id + label + ikm, "sha256")

    def expanded(key: bytes, label: bytes, info: bytes, length: int) -> bytes:
        data = length.to_bytes(2, "big") + b"HPKE-v1" + suite_id + label + info
        return hmac.digest(key, data + b"\1", "sha256")[:length]  # at most one block

    suite_id = b"HPKE" + b"".join(number.to_bytes(2, "big") for number in (0x647A, 1, 2))
    context = b"\0" + extract(b"", b"psk_id_hash", b"") + extract(b"", b"info_hash", b"info")
    key = extract(secret, b"secret", b"")
    nonce = expanded(key, b"base_nonce", context, 12)
    assert AESGCM(expanded(key, b"key", context, 32)).decrypt(nonce, sealed, b"") == b"rows"


def test_a_build_without_ml_kem_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate() -> None:
        raise UnsupportedAlgorithm("ML-KEM-768 is not supported by this version of OpenSSL")

    hybrid.require_hybrid("masking = 'pad'")
    monkeypatch.setattr(hybrid, "MLKEM768PrivateKey", SimpleNamespace(generate=generate))
    with pytest.raises(ConfigError, match=r"masking = 'pad'.* no ML-KEM-768.*cryptography>=48"):
        hybrid.require_hybrid("masking = 'pad'")
