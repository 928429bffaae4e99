"""The chain and its head: a head stands for every entry before it, and for the name of one registry."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from symbiosis_priv.certificates import load_certificates
from symbiosis_priv.errors import DescriptorError
from symbiosis_priv.registry.history import Head, Span, VouchedHead, beginning, check_span, link, sign_head, verify_head
from symbiosis_priv.registry.statements import MS
from tests.vouching import Vouching

ENTRIES = st.lists(st.binary(max_size=8), max_size=6)


@pytest.fixture(scope="module")
def vouching(tmp_path_factory: pytest.TempPathFactory) -> Vouching:
    return Vouching.in_folder(tmp_path_factory.mktemp("vouching"))


def chained(name: str, entries: Sequence[bytes]) -> bytes:
    found = beginning(name)
    for data in entries:
        found = link(found, data)
    return found


def signed(vouching: Vouching, entries: int, hash: bytes, *, name: str = "registry") -> bytes:
    identity = vouching.identity(name)
    certificate = load_certificates(identity.certificate)[0].public_bytes(Encoding.DER)
    head = Head(issued=vouching.began, certificate=certificate, entries=entries, hash=hash)
    return sign_head(head, identity.private_key())


def vouched(vouching: Vouching, entries: int, hash: bytes, *, name: str = "registry") -> VouchedHead:
    return verify_head(signed(vouching, entries, hash, name=name), vouching.trust, now=vouching.began / MS)


@given(entries=ENTRIES, other=ENTRIES, split=st.integers(0, 6))
def test_a_hash_stands_for_every_entry(entries: list[bytes], other: list[bytes], split: int) -> None:
    assert (chained("registry", entries) == chained("registry", other)) == (entries == other)
    assert chained("registry", entries) != chained("another", entries)
    split = min(split, len(entries))
    first = Span(0, beginning("registry"), entries[:split])
    second = Span(split, first.hashes()[split], entries[split:])
    assert second.last == len(entries)
    assert second.hashes()[len(entries)] == chained("registry", entries)


def test_a_head_fits_its_own_entries_and_no_others(vouching: Vouching) -> None:
    entries = [b"a", b"b", b"c"]
    span = Span(0, beginning("registry"), entries)
    check_span(span, vouched(vouching, 3, chained("registry", entries)))
    check_span(span, vouched(vouching, 9, bytes(32)))  # of later entries, which are not here
    check_span(Span(2, chained("registry", entries[:2]), [b"c"]), vouched(vouching, 3, chained("registry", entries)))
    for head in (
        vouched(vouching, 3, chained("registry", [b"a", b"x", b"c"])),
        vouched(vouching, 2, chained("registry", [b"a", b"b"])),  # of fewer than are shown
        vouched(vouching, 0, beginning("registry")),
    ):
        with pytest.raises(DescriptorError, match="is not that of the entries"):
            check_span(span, head)
    foreign = Span(0, beginning("another"), entries)
    with pytest.raises(DescriptorError, match="does not begin as a log of that name"):
        check_span(foreign, vouched(vouching, 3, chained("another", entries)))


@pytest.mark.filterwarnings("ignore:Parsed a serial number which wasn't positive")  # cryptography: of what is refused
def test_a_head_is_signed_by_a_registry_of_the_federation(
    vouching: Vouching, tmp_path_factory: pytest.TempPathFactory
) -> None:
    good = signed(vouching, 3, bytes(32))
    assert verify_head(good, vouching.trust, now=vouching.began / MS).name == "registry"
    for place in range(0, len(good), 7):
        altered = bytearray(good)
        altered[place] ^= 1
        with pytest.raises(DescriptorError):
            verify_head(bytes(altered), vouching.trust, now=vouching.began / MS)
    stranger = Vouching.in_folder(tmp_path_factory.mktemp("stranger"))
    for data in (signed(stranger, 3, bytes(32)), vouching.says("gamma")):
        with pytest.raises(DescriptorError):
            verify_head(data, vouching.trust, now=vouching.began / MS)
    with pytest.raises(DescriptorError, match="future"):
        verify_head(good, vouching.trust, now=vouching.began / MS - 120)
