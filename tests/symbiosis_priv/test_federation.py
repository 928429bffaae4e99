"""`federation.toml`: what is accepted, what is refused with which words, and rules 8 and 11 however it is written."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
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
from symbiosis_priv.federation import Company, Federation, Peer, check_parties, load_federation, parse_address
from symbiosis_priv.layers import LayerRange
from symbiosis_priv.limits import Role

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
        return "\n".join(
            [header, *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in entries.items()), ""]
        )

    def write(
        *,
        model: Any = None,
        alpha: Any = None,
        beta: Any = None,
        gamma: Any = None,
        pads: Any = None,
        companies: Sequence[Any] = (),
    ) -> Path:
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
        if pads is not None:
            sections.append(section("[pads]", pads))
        sections += [section("[[company]]", company) for company in companies]
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
        ({"alpha": {"layers": "15-0"}}, "provider 'alpha': layers 15-0 are none: .* as in 0-15"),
        ({"alpha": {"layers": "-4"}}, "provider 'alpha': layers = '-4' is no range .* as in '0-15'"),
        ({"alpha": {"layers": 4}}, r"provider\[0\].layers"),
        ({"pads": {}}, "pads"),
        ({"pads": {"helpers": 0}}, "pads.helpers"),
        ({"pads": {"helpers": -1}}, "pads.helpers"),
        ({"pads": {"helpers": True}}, "pads.helpers"),
        ({"pads": {"helpers": 2}}, "helpers = 2, and 1 .* have role = 'helper': add helpers, or lower it"),
        ({"pads": {"helpers": 1 << 62}}, "add helpers, or lower it"),
        ({"companies": [{"name": "H", "members": []}]}, "company 'H' joins nobody: list two or more members"),
        ({"companies": [{"name": "H", "members": ["alpha"]}]}, "company 'H' joins nobody"),
        ({"companies": [{"name": "H", "members": ["alpha", "zeta"]}]}, "is called 'zeta'; there are 'alpha', 'beta'"),
        ({"companies": [{"name": "H", "members": ["alpha", " ALPHA"]}]}, "lists 'alpha' twice in members: remove one"),
        (
            {"companies": [{"name": n, "members": ["alpha", "gamma"]} for n in "Hh"], "gamma": {"role": "executor"}},
            "two",
        ),
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
    for operator in ("b", " A ", "\uff21", "A\ufe0f", "\u3164a", "A\x00", "\u034fA", "\U000e0041A\U000e0100", "\x0bA"):
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


def test_layers_and_pads_are_read(write: Write) -> None:
    federation = load_federation(write(alpha={"layers": "7"}, beta={"layers": "0-15"}, pads={"helpers": 1}))
    assert [peer.layers for peer in federation.peers] == [LayerRange(7, 7), LayerRange(0, 15)]
    assert federation.pad_helpers == 1
    plain = load_federation(write())
    assert plain.pad_helpers is None
    assert [peer.layers for peer in plain.peers] == [None, None]


JOINED = [
    pytest.param([{"name": "Holding SE", "members": ["alpha", "beta"]}], {}, id="listed together"),
    pytest.param([{"name": "Holding SE", "members": ["\uff21lpha\u200b", " BETA "]}], {}, id="spelled otherwise"),
    pytest.param([{"name": " b", "members": ["alpha", "gamma"]}], {}, id="the company is the other's operator"),
    pytest.param([{"name": "H", "members": ["alpha"], "operators": ["b\u200b"]}], {}, id="an operator of the company"),
    pytest.param(
        [{"name": "H", "members": ["alpha", "gamma"]}, {"name": "I", "members": ["gamma", "beta"]}], {}, id="two steps"
    ),
    pytest.param([{"name": "H", "members": ["alpha", "gamma"]}], {"operator": "\uff22"}, id="company and operator"),
]


@pytest.mark.parametrize(("companies", "gamma"), JOINED)
def test_rule_8_a_company_is_one_party(write: Write, companies: list[Any], gamma: dict[str, str]) -> None:
    """Refused where all helpers share every pad, and where the helper is needed; not where another one is there."""
    parties = {"gamma": {"role": "executor", **gamma}, "companies": companies}
    with pytest.raises(RoleConflictError, match="'alpha' and helper 'beta' have the same company: together they would"):
        load_federation(write(**parties))
    with pytest.raises(RoleConflictError, match="executor 'alpha' has helpers of 0 companies other than its own"):
        load_federation(write(**parties, pads={"helpers": 1}))


@pytest.mark.parametrize("operator", ["A", " a\u200b"])
def test_with_pads_a_company_may_have_both_roles_beside_enough_others(write: Write, operator: str) -> None:
    beta = {"operator": operator}
    with pytest.raises(RoleConflictError, match="executor 'alpha' and helper 'beta' have the same operator"):
        load_federation(write(beta=beta, gamma={}))
    federation = load_federation(write(beta=beta, gamma={}, pads={"helpers": 1}))
    alpha, helper, other = federation.peers
    assert federation.one_company(alpha, helper)
    assert not federation.admissible(alpha, [other, helper])
    assert federation.admissible(alpha, [other])
    with pytest.raises(
        RoleConflictError, match=r"helpers of 1 companies .* helpers = 2 takes 2 of different companies"
    ):
        load_federation(write(beta=beta, gamma={}, pads={"helpers": 2}))
    with pytest.raises(RoleConflictError, match="helpers of 1 companies"):  # two helpers, and one company behind them
        load_federation(write(beta={"operator": "C"}, gamma={}, pads={"helpers": 2}))


@pytest.mark.parametrize("same", [{"certificate": "keys/alpha.pem"}, {"address": "A.:1"}], ids=str)
@pytest.mark.parametrize("name", ["certificate", "next_certificate"])
def test_rule_11_holds_with_pads_too(write: Write, same: dict[str, str], name: str) -> None:
    if "certificate" in same:
        same = {name: same["certificate"]}
    with pytest.raises(RoleConflictError, match="executor 'alpha' and helper 'beta' have the same"):
        load_federation(write(beta=same, gamma={}, pads={"helpers": 1}))


@pytest.mark.parametrize(
    ("alpha", "beta", "gamma", "helpers", "short_at"),
    [
        ("0-7", "0-7", "0-7", 2, None),
        ("0-7", "0-3", "4-7", 1, None),
        ("0-7", "0-3", "5-7", 1, 4),
        ("0-7", "0-7", "4-7", 2, 0),
        ("4-7", "0-7", "4-9", 2, None),
        ("0-7", "8-9", "8-9", 1, 0),
        ("0-7", "8-9", None, 1, None),
        (None, "0-3", "4-7", 1, None),
        (None, "0-3", "4-7", 2, 0),
        (None, "0-3", "2-7", 2, None),
    ],
)
def test_enough_helpers_for_every_layer_that_an_executor_must_serve(
    write: Write, alpha: str | None, beta: str | None, gamma: str | None, helpers: int, short_at: int | None
) -> None:
    def layers(text: str | None) -> dict[str, str]:
        return {} if text is None else {"layers": text}

    path = write(alpha=layers(alpha), beta=layers(beta), gamma=layers(gamma), pads={"helpers": helpers})
    if short_at is None:
        load_federation(path)
    else:
        with pytest.raises(RoleConflictError, match=f"executor 'alpha' .* at layer {short_at},"):
            load_federation(path)


NAMES = [f"p{i}" for i in range(6)]


@st.composite
def worlds(draw: st.DrawFn) -> Federation:
    """Peers with few operators, companies among them, names spelled as people do."""

    def spelled(text: str) -> str:
        return draw(st.sampled_from([text, text.upper(), f" {text}", f"{text}\u200b"]))

    def peer(name: str) -> Peer:
        role: Role = draw(st.sampled_from(["executor", "helper"]))
        return Peer(name, spelled(draw(st.sampled_from("abcd"))), role, "host", 1, Path("none.pem"))

    members = st.lists(st.sampled_from(NAMES), min_size=2, max_size=3, unique=True)
    companies = [
        Company(spelled(draw(st.sampled_from(["a", "x", "y"]))), tuple(map(spelled, draw(members))))
        for _ in range(draw(st.integers(0, 3)))
    ]
    return Federation(DIGEST, 10, Path("t.pem"), Path("t.key"), tuple(map(peer, NAMES)), tuple(companies))


@given(worlds())
def test_one_company_is_the_closure_of_operators_and_companies(world: Federation) -> None:
    """Against the definition: repeat until nothing changes."""

    def plain(text: str) -> str:
        return text.strip().strip("\u200b").casefold()

    together = [{p.name for p in world.peers if plain(p.operator) == operator} for operator in "abcd"]
    for company in world.companies:
        same_name = [c for c in world.companies if plain(c.name) == plain(company.name)]
        operated = {p.name for p in world.peers if plain(p.operator) == plain(company.name)}
        together.append(operated.union(*({plain(m) for m in c.members} for c in same_name)))
    for _ in NAMES:
        together = [set().union(*(other for other in together if not own.isdisjoint(other))) or own for own in together]
    for one, other in itertools.product(world.peers, repeat=2):
        expected = any({one.name, other.name} <= party for party in together)
        assert world.one_company(one, other) == expected
        assert world.admissible(one, [other]) != expected
    assert world.companies_of(world.peers) == len({frozenset(party) for party in together if party})


def test_a_peer_that_is_not_in_the_file_belongs_to_its_operators_company() -> None:
    def peer(name: str, operator: str, role: Role = "executor") -> Peer:
        return Peer(name, operator, role, "host", 1, Path("none.pem"))

    helper = peer("beta", "B", "helper")
    company = Company("Holding SE", ("beta",), ("Delta AG",))
    federation = Federation(DIGEST, 10, Path("t.pem"), Path("t.key"), (helper,), (company,))
    for stranger in (peer("x", " b"), peer("x", "delta ag"), peer("x", "HOLDING SE"), peer("Beta\u200b", "E")):
        assert federation.one_company(stranger, helper)
        assert federation.one_company(helper, stranger)
        assert not federation.admissible(stranger, [helper])
        assert federation.companies_of([stranger, helper]) == 1
    assert federation.admissible(peer("x", "E"), [helper])
    assert federation.companies_of([peer("x", "E"), helper]) == 2


def test_check_parties_without_the_files_further_keys_is_as_strict_as_ever(write: Write) -> None:
    """Whoever forgets to pass them gets a refusal, never a pass."""
    federation = load_federation(write(beta={"operator": "A"}, gamma={}, pads={"helpers": 1}))
    check_parties(federation.peers, pad_helpers=federation.pad_helpers)
    with pytest.raises(RoleConflictError, match="have the same operator"):
        check_parties(federation.peers)
