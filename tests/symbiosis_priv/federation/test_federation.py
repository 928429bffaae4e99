"""`federation.toml`: accepted content, refusals with their messages, and rule 8 for every choice of helpers."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.certificates.issuing import create_authority
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.errors import CertificateError, ConfigError, RoleConflictError
from symbiosis_priv.federation import Company, Federation, Peer, load_federation
from symbiosis_priv.limits import Role
from tests.cases import cases
from tests.symbiosis_priv.federation.conftest import Write

DIGEST = "sha256:" + "0" * 64
NAMES = [f"p{i}" for i in range(6)]


@st.composite
def worlds(draw: st.DrawFn) -> Federation:
    """Peers with few operators, companies among them, names in different spellings."""

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
    """Compared with the definition: repeat until nothing changes."""

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


@pytest.mark.parametrize("operator", ["A", " a\u200b"])
def test_with_pads_a_company_may_have_both_roles_if_there_are_enough_others(write: Write, operator: str) -> None:
    beta = {"operator": operator}
    with pytest.raises(RoleConflictError, match="executor 'alpha' and helper 'beta' have the same operator"):
        load_federation(write(beta=beta, gamma={}))
    federation = load_federation(write(beta=beta, gamma={}, pads={"helpers": 1}))
    alpha, helper, other = federation.peers
    assert federation.one_company(alpha, helper)
    assert not federation.admissible(alpha, [other, helper])
    assert federation.admissible(alpha, [other])
    with pytest.raises(RoleConflictError, match=r"helpers of 1 companies .* helpers = 2 needs 2 different companies"):
        load_federation(write(beta=beta, gamma={}, pads={"helpers": 2}))
    with pytest.raises(RoleConflictError, match="helpers of 1 companies"):  # two helpers of one company
        load_federation(write(beta={"operator": "C"}, gamma={}, pads={"helpers": 2}))


def test_helpers_are_of_enough_companies_also_for_executors_from_a_registry(write: Write) -> None:
    for operator, refused in (("B", True), ("C", False)):
        path = write(alpha={"role": "helper", "operator": operator}, pads={"helpers": 2})
        path.write_text(path.read_text() + '\n[registry]\naddresses = ["r.example:1"]\nauthority = "keys/ca.pem"\n')
        if refused:
            with pytest.raises(RoleConflictError, match=r"2 different companies .* belong to 1: add helpers"):
                load_federation(path)
        else:
            assert load_federation(path).executors == ()


@cases(__file__, "helpers")
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


def test_paths_are_relative_to_the_file_and_home_is_expanded(write: Write, keys: Path) -> None:
    federation = load_federation(write())
    assert [peer.certificate for peer in federation.peers] == [keys / "alpha.pem", keys / "beta.pem"]
    assert federation.tenant_certificate == keys / "alice.pem"
    assert federation.tenant_key == Path.home() / "alice.key"
    assert [peer.name for peer in (*federation.executors, *federation.helpers)] == ["alpha", "beta"]


@cases(__file__, "wrong")
def test_a_wrong_file_is_named_with_its_key(write: Write, changes: dict[str, Any], words: str) -> None:
    path = write(**changes)
    with pytest.raises(ConfigError, match=words) as caught:
        load_federation(path)
    assert str(path) in str(caught.value)


def test_a_registry_needs_an_address(write: Write) -> None:
    for address, words in (("r.example:0", "port 0 is not valid"), ("r.example", "is not host:port")):
        path = write()
        path.write_text(f'{path.read_text()}\n[registry]\naddresses = ["{address}"]\nauthority = "keys/ca.pem"\n')
        with pytest.raises(ConfigError, match=rf"\[registry\]: .*{words}"):
            load_federation(path)


def test_a_pinned_file_holds_one_provider(write: Write, keys: Path) -> None:
    both = keys / "both.pem"
    both.write_text((keys / "beta.pem").read_text() + (keys / "alpha.pem").read_text())
    create_authority(keys, name="ca")
    for field in ("certificate", "next_certificate"):
        with pytest.raises(
            CertificateError, match=r"federation\.toml: .*both\.pem holds 2 certificates.*next_certificate"
        ):
            load_federation(write(beta={field: "keys/both.pem"}))
        with pytest.raises(CertificateError, match=r"ca\.pem is not a provider certificate"):
            load_federation(write(beta={field: "keys/ca.pem"}))


def test_layers_and_pads_are_read(write: Write) -> None:
    federation = load_federation(write(alpha={"layers": "7"}, beta={"layers": "0-15"}, pads={"helpers": 1}))
    assert [peer.layers for peer in federation.peers] == [LayerRange(7, 7), LayerRange(0, 15)]
    assert federation.pad_helpers == 1
    plain = load_federation(write())
    assert plain.pad_helpers is None
    assert [peer.layers for peer in plain.peers] == [None, None]
