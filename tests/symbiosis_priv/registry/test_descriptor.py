"""Signed descriptors: valid ones are accepted; any change of a byte, a key or a time makes them invalid."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given, strategies as st

from symbiosis_priv.certificates import issuing, reading
from symbiosis_priv.certificates.reading import Identity, Kind
from symbiosis_priv.certificates.revocation import mark_of
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.errors import CertificateError, DescriptorError
from symbiosis_priv.registry.descriptor import (
    CLOCK_TOLERANCE_S,
    MAX_BYTES,
    MAX_LIFETIME_S,
    MS,
    Descriptor,
    Trust,
    sign,
    verify,
)
from tests.cases import cases

DIGEST = "sha256:" + "0" * 64
DOMAIN = b"symbiosis-priv descriptor 1\0"


@dataclass(frozen=True)
class World:
    """A federation's authority, one of its providers, and certificates that it does not accept for an executor."""

    trust: Trust
    gamma: Identity
    delta: Identity
    others: dict[str, Identity]
    began: float

    @functools.cached_property
    def good(self) -> bytes:
        return sign(self.said(), self.gamma.private_key())

    def said(self, identity: Identity | None = None, **changes: Any) -> Descriptor:
        now = round(MS * self.began)
        certificate = reading.load_certificates((identity or self.gamma).certificate)[0]
        values: dict[str, Any] = {
            "host": "gamma.example",
            "port": 7401,
            "model_digest": DIGEST,
            "weight_bits": 10,
            "first_layer": 0,
            "last_layer": 15,
            "issued": now,
            "expires": now + 600 * MS,
            "draining": False,
            "certificate": certificate.public_bytes(Encoding.DER),
        }
        return Descriptor(**(values | changes))


def signed(body: bytes, identity: Identity, *, domain: bytes = DOMAIN) -> bytes:
    """Sign any bytes as an executor would."""
    key = identity.private_key()
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return msgspec.msgpack.encode({"body": body, "signature": key.sign(domain + body, ec.ECDSA(hashes.SHA256()))})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("registry")
    authority = issuing.create_authority(folder, name="federation")
    stranger = issuing.create_authority(folder, name="stranger")

    def issue(name: str, *, signer: Identity = authority, operator: str | None = "Gamma AG") -> Identity:
        return issuing.issue(
            folder, authority=signer, kind=Kind.PROVIDER, name=name, hosts=["gamma.example"], operator=operator
        )

    gamma = issue("gamma")
    own = issuing.issue(folder / "own", authority=None, kind=Kind.PROVIDER, name="gamma", hosts=["gamma.example"])
    tenant = issuing.issue(folder, authority=authority, kind=Kind.TENANT, name="alice")
    others = {
        "its certificate is not one": issue("forger", signer=stranger),
        "not one that the federation": own,
        "is not a provider's": tenant,
        "names no operator": issue("nobody", operator=None),
    }
    valid_from = reading.load_certificates(gamma.certificate)[0].not_valid_before_utc
    return World(Trust.load(authority.certificate), gamma, issue("delta"), others, valid_from.timestamp() + 1000)


def test_a_descriptor_that_an_executor_has_signed_is_accepted(world: World) -> None:
    vouched = verify(world.good, world.trust, now=world.began)
    assert vouched.descriptor == world.said()
    assert (vouched.name, vouched.operator, vouched.data) == ("gamma", "Gamma AG", world.good)
    assert vouched.key == reading.key_fingerprint(vouched.certificate)
    assert vouched.descriptor.layers == LayerRange(0, 15)


# cryptography's warnings about refused certificates
@pytest.mark.filterwarnings("ignore:Parsed a serial number which wasn't positive")
@pytest.mark.parametrize("bits", [0x01, 0x20, 0x80, 0xFF])
def test_any_flipped_byte_is_refused(world: World, bits: int) -> None:
    for place in range(len(world.good)):
        altered = bytearray(world.good)
        altered[place] ^= bits
        with pytest.raises(DescriptorError):
            verify(bytes(altered), world.trust, now=world.began)


@given(data=st.data())
def test_truncated_or_extended_data_is_refused(world: World, data: st.DataObject) -> None:
    start, stop = sorted(data.draw(st.lists(st.integers(0, len(world.good)), min_size=2, max_size=2)))
    altered = world.good[:start] + data.draw(st.binary(max_size=40)) + world.good[stop:]
    if altered != world.good:
        with pytest.raises(DescriptorError):
            verify(altered, world.trust, now=world.began)


@given(st.binary(max_size=300) | st.binary(min_size=MAX_BYTES + 1, max_size=MAX_BYTES + 9))
def test_any_bytes_are_accepted_or_an_error_of_the_tree(world: World, data: bytes) -> None:
    with pytest.raises(DescriptorError):
        verify(data, world.trust, now=world.began)


def test_another_encoding_of_the_same_values_is_refused_even_if_it_is_signed(world: World) -> None:
    fields = msgspec.structs.asdict(world.said())
    body = msgspec.msgpack.encode(dict(reversed(fields.items())))
    with pytest.raises(DescriptorError, match="canonical"):
        verify(signed(body, world.gamma), world.trust, now=world.began)


def test_certificates_that_the_authority_has_not_issued_are_refused(world: World) -> None:
    for words, identity in world.others.items():
        forged = sign(world.said(identity), identity.private_key())
        with pytest.raises(DescriptorError, match=words):
            verify(forged, world.trust, now=world.began)


def test_a_signature_by_another_key_or_with_another_domain_is_refused(world: World) -> None:
    forged = sign(world.said(world.gamma), world.delta.private_key())
    with pytest.raises(DescriptorError, match="not signed by the key of its certificate"):
        verify(forged, world.trust, now=world.began)
    body = msgspec.msgpack.encode(world.said())
    verify(signed(body, world.gamma), world.trust, now=world.began)
    for domain in (b"", b"symbiosis-priv descriptor 2\0", b"descriptor 1\0"):
        with pytest.raises(DescriptorError, match="not signed"):
            verify(signed(body, world.gamma, domain=domain), world.trust, now=world.began)


def test_a_revoked_certificate_is_refused(world: World) -> None:
    revoked = frozenset({mark_of(reading.load_certificates(world.gamma.certificate)[0])})
    with pytest.raises(DescriptorError, match="revoked"):
        verify(world.good, Trust(world.trust.authorities, revoked), now=world.began)


def test_the_host_must_be_in_the_certificate(world: World) -> None:
    for host in ("delta.example", "GAMMA.example", "gamma.example.", "127.0.0.1", "*.example"):
        with pytest.raises(DescriptorError, match="claims a host"):
            verify(sign(world.said(host=host), world.gamma.private_key()), world.trust, now=world.began)


@given(shift=st.integers(-2 * MAX_LIFETIME_S, 2 * MAX_LIFETIME_S), life=st.integers(1, MAX_LIFETIME_S))
def test_a_descriptor_is_valid_between_issue_and_expiry_within_the_clock_tolerance(
    world: World, shift: int, life: int
) -> None:
    said = world.said()
    data = sign(msgspec.structs.replace(said, expires=said.issued + MS * life), world.gamma.private_key())
    certificate_holds = shift >= -1000
    if certificate_holds and -CLOCK_TOLERANCE_S <= shift <= life + CLOCK_TOLERANCE_S:
        verify(data, world.trust, now=said.issued / MS + shift)
    else:
        with pytest.raises(DescriptorError, match=r"future|expired|not valid then"):
            verify(data, world.trust, now=said.issued / MS + shift)


def test_an_expired_certificate_is_refused(world: World) -> None:
    end = reading.load_certificates(world.gamma.certificate)[0].not_valid_after_utc.timestamp()
    for now, good in ((end - 10, True), (end + 10, False)):
        said = world.said(issued=round(MS * (end - 20)), expires=round(MS * (end + 600)))
        data = sign(said, world.gamma.private_key())
        if good:
            verify(data, world.trust, now=now)
        else:
            with pytest.raises(DescriptorError, match="not valid then"):
                verify(data, world.trust, now=now)


@cases(__file__, "changes")
def test_other_fields_and_values_are_refused_even_if_they_are_signed(world: World, changes: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode({**msgspec.structs.asdict(world.said()), **changes})
    with pytest.raises(DescriptorError, match="malformed"):
        verify(signed(body, world.gamma), world.trust, now=world.began)


def test_no_descriptor_is_valid_for_longer_than_a_day(world: World) -> None:
    with pytest.raises(ValueError, match="lifetime"):
        world.said(expires=world.said().issued + MS * MAX_LIFETIME_S + 1)


def test_only_a_ca_certificate_is_an_authority(world: World, tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="holds no CA certificate"):
        Trust.load(world.gamma.certificate)
    both = tmp_path / "both.pem"
    authority = world.trust.authorities[0].public_bytes(Encoding.PEM)
    both.write_bytes(world.gamma.certificate.read_bytes() + authority)
    assert Trust.load(both).authorities == world.trust.authorities
