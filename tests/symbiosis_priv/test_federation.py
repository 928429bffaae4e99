"""`federation.toml`: what is accepted, what is refused with which words, and rules 8 and 11 however it is written."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import example, given
from hypothesis import strategies as st

from symbiosis_priv.certificates import Identity, Kind, create_authority, create_self_signed, load_certificates
from symbiosis_priv.errors import CertificateError, ConfigError, RoleConflictError
from symbiosis_priv.federation import load_federation, parse_address

Write = Callable[..., Path]
DIGEST = "sha256:" + "0" * 64


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Self-signed certificates of three providers, and a second one for the first one's key."""
    folder = tmp_path_factory.mktemp("federation") / "keys"
    for name in ("alpha", "beta", "gamma"):
        create_self_signed(folder, kind=Kind.PROVIDER, name=name)
    (folder / "alpha-next.pem").write_bytes(renewed(folder / "alpha"))
    return folder


def renewed(pair: Path) -> bytes:
    """One more certificate for a provider's own key, as PEM."""
    key = Identity(pair.with_suffix(".pem"), pair.with_suffix(".key")).private_key()
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    old = load_certificates(pair.with_suffix(".pem"))[0]
    builder = x509.CertificateBuilder(old.issuer, old.subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(old.not_valid_before_utc).not_valid_after(old.not_valid_after_utc)
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def write(keys: Path) -> Write:
    """Writes a good federation.toml beside `keys`, with changes: tables of it, or entries of its providers."""

    def section(header: str, entries: dict[str, Any]) -> str:
        return "\n".join([header, *(f"{key} = {json.dumps(value)}" for key, value in entries.items()), ""])

    def write(*, model: Any = None, alpha: Any = None, beta: Any = None, gamma: Any = None) -> Path:
        one = {"name": "alpha", "operator": "A", "role": "executor", "address": "a:1", "certificate": "keys/alpha.pem"}
        two = {"name": "beta", "operator": "B", "role": "helper", "address": "b:1", "certificate": "keys/beta.pem"}
        three = {
            "name": "gamma",
            "operator": "C",
            "role": "helper",
            "address": "c:1",
            "certificate": "keys/gamma.pem",
        }
        path = keys.parent / "federation.toml"
        sections = [
            section("[model]", {"digest": DIGEST, **(model or {})}),
            section("[tenant]", {"certificate": "keys/alice.pem", "key": "~/alice.key"}),
            section("[[provider]]", {**one, **(alpha or {})}),
            section("[[provider]]", {**two, **(beta or {})}),
        ]
        if gamma is not None:
            sections.append(section("[[provider]]", {**three, **gamma}))
        path.write_text("\n".join(sections), encoding="utf-8")
        return path

    return write


def test_paths_are_relative_to_the_file_and_home_is_expanded(write: Write, keys: Path) -> None:
    federation = load_federation(write())
    assert [peer.certificate for peer in federation.peers] == [keys / "alpha.pem", keys / "beta.pem"]
    assert federation.tenant_certificate == keys / "alice.pem"
    assert federation.tenant_key == Path.home() / "alice.key"
    assert [peer.name for peer in (*federation.executors, *federation.helpers)] == ["alpha", "beta"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"digest": "sha256:ff"}}, "model.digest"),
        ({"model": {"weight_bits": 40}}, "model.weight_bits"),
        ({"model": {"weigth_bits": 10}}, "weigth_bits"),
        ({"alpha": {"role": "boss"}}, r"provider\[0\].role"),
        ({"alpha": {"role": "helper"}}, "role = 'executor'"),
        ({"alpha": {"address": "a"}}, "provider 'alpha': address 'a' is not host:port"),
        ({"beta": {"address": "b:0"}}, "provider 'beta': nobody listens at port 0"),
        ({"beta": {"name": "alpha"}}, "'alpha' and helper 'alpha' have the same name"),
        ({"beta": {"certificate": 7}}, r"provider\[1\].certificate"),
    ],
    ids=str,
)
def test_a_wrong_file_is_named_with_its_key(write: Write, changes: dict[str, Any], words: str) -> None:
    path = write(**changes)
    with pytest.raises(ConfigError, match=words) as caught:
        load_federation(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("same", "shared"),
    [
        ({"name": "ALPHA"}, "name"),
        ({"name": "\uff41lpha\u200b"}, "name"),  # a full-width letter, and one that nobody sees
        ({"certificate": "keys/alpha.pem"}, "certificate, public key"),
        ({"next_certificate": "keys/alpha.pem"}, "certificate, public key"),
        ({"certificate": "keys/alpha-next.pem"}, "public key"),
        ({"next_certificate": "keys/alpha-next.pem"}, "public key"),
        ({"address": "A:1"}, "address"),
        ({"address": "a.:01"}, "address"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("one", "other", "error"),
    [
        ("executor", "helper", RoleConflictError),
        ("executor", "executor", ConfigError),
        ("helper", "helper", ConfigError),
    ],
)
def test_rule_11_no_party_is_listed_twice(
    write: Write, one: str, other: str, error: type[ConfigError], same: dict[str, str], shared: str
) -> None:
    path = write(alpha={"role": one}, beta={"role": other, **same}, gamma={"role": "executor"})
    name = same.get("name", "beta")
    with pytest.raises(ConfigError, match=f"{one} 'alpha' and {other} .* have the same {shared}[:,]") as caught:
        load_federation(path)
    assert caught.type is (ConfigError if shared == "name" else error)
    assert str(path) in str(caught.value)
    assert repr(name) in str(caught.value)


def test_rule_8_an_operator_may_run_two_executors_and_no_helper_beside(write: Write) -> None:
    executors = load_federation(write(beta={"role": "executor", "operator": "a"}, gamma={}))
    assert len(executors.executors) == 2
    for operator in ("b", " A ", "\uff21"):
        with pytest.raises(RoleConflictError, match="executor 'alpha' and helper 'beta' have the same operator"):
            load_federation(write(alpha={"operator": "A" if operator != "b" else "B"}, beta={"operator": operator}))


@pytest.mark.parametrize(
    "spellings",
    [
        (
            "127.0.0.1",
            "localhost",
            "LOCALHOST.",
            "a.localhost",
            "[::1]",
            "127.1",
            "[::ffff:127.0.0.1]",
            "0.0.0.0",
            "[::]",
        ),
        ("[2001:db8::1]", "[2001:DB8:0:0::1]", "2001:0db8::0001"),
        ("b\u00fccher.example", "xn--bcher-kva.example", "B\u00dcCHER.example."),
    ],
    ids=lambda spellings: str(spellings[0]),
)
def test_rule_11_one_address_in_many_spellings(write: Write, spellings: tuple[str, ...]) -> None:
    for one, other in itertools.combinations(spellings, 2):
        with pytest.raises(ConfigError, match="have the same address"):
            load_federation(write(alpha={"address": f"{one}:7401"}, beta={"address": f"{other}:7401"}))
    load_federation(write(alpha={"address": f"{spellings[0]}:7401"}, beta={"address": f"{spellings[1]}:7402"}))


def test_a_pinned_file_holds_one_provider(write: Write, keys: Path) -> None:
    both = keys / "both.pem"
    both.write_text((keys / "beta.pem").read_text() + (keys / "alpha.pem").read_text())
    create_authority(keys, name="ca")
    for field in ("certificate", "next_certificate"):
        with pytest.raises(
            CertificateError, match=r"federation\.toml: .*both\.pem holds 2 certificates.*next_certificate"
        ):
            load_federation(write(beta={field: "keys/both.pem"}))
        with pytest.raises(CertificateError, match=r"ca\.pem is no provider certificate"):
            load_federation(write(beta={field: "keys/ca.pem"}))


def test_a_rotation_pins_both_and_keeps_the_party(write: Write, keys: Path) -> None:
    before = load_federation(write())
    during = load_federation(write(beta={"next_certificate": "keys/gamma.pem"}))
    after = load_federation(write(beta={"certificate": "keys/gamma.pem"}))
    assert during.helpers[0].pins == (keys / "beta.pem", keys / "gamma.pem")
    fingerprints = [federation.helpers[0].key_fingerprint for federation in (before, during, after)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


@given(host=st.text(st.characters(exclude_characters="[]"), min_size=1), port=st.integers(0, (1 << 16) - 1))
def test_an_address_comes_apart_as_it_was_put_together(host: str, port: int) -> None:
    assert parse_address(f"{host}:{port}") == parse_address(f"[{host}]:{port}") == (host, port)


@example("[]:1")
@example("a:" + "1" * 5000)
@given(st.text() | st.from_regex(r"\A[a-z]*:-?[0-9]{5,7}\Z"))
def test_an_address_is_good_or_a_config_error(text: str) -> None:
    try:
        host, port = parse_address(text)
    except ConfigError:
        return
    assert host
    assert 0 <= port < 1 << 16
