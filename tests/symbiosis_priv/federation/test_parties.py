"""No party is listed twice or in two roles (rules 8 and 11), however its names are written."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.errors import ConfigError, RoleConflictError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.federation.parties import plain
from tests.cases import cases
from tests.symbiosis_priv.federation.conftest import Write


@cases(__file__, "one-party-twice")
@pytest.mark.parametrize(
    ("one", "other", "error"),
    [
        ("executor", "helper", RoleConflictError),
        ("executor", "executor", ConfigError),
        ("helper", "helper", ConfigError),
    ],
)
def test_rule_11_no_party_is_listed_twice(
    write: Write, one: str, other: str, error: type[ConfigError], same: dict[str, Any], shared: str
) -> None:
    path = write(alpha={"role": one}, beta={"role": other, **same}, gamma={"role": "executor"})
    name = same.get("name", "beta")
    with pytest.raises(ConfigError, match=f"{one} 'alpha' and {other} .* have the same {shared}[:,]") as caught:
        load_federation(path)
    assert caught.type is (ConfigError if shared == "name" else error)
    assert str(path) in str(caught.value)
    assert repr(name) in str(caught.value)


def test_rule_8_an_operator_may_run_two_executors_but_no_helper_with_them(write: Write) -> None:
    executors = load_federation(write(beta={"role": "executor", "operator": "a"}, gamma={}))
    assert len(executors.executors) == 2
    for operator in ("b", " A ", "\uff21", "A\ufe0f", "\u3164a", "A\x00", "\u034fA", "\U000e0041A\U000e0100", "\x0bA"):
        with pytest.raises(RoleConflictError, match="executor 'alpha' and helper 'beta' have the same operator"):
            load_federation(write(alpha={"operator": "A" if operator != "b" else "B"}, beta={"operator": operator}))


# Invisible characters: fillers, a braille pattern without dots, a note without a head, spaces, an unassigned character.
BLANKS = "\u3164\uffa0\u2800\U0001d159\U00016fe4\u3000\u00a0\u200b\u2060\ufe0f\u115f\u17b4\U000e0100\ue000\U0003fffd "


@cases(__file__, "names-that-look-the-same")
def test_rule_8_a_name_in_other_letters_that_look_the_same_is_the_same(write: Write, latin: str, other: str) -> None:
    """Each name has one script, so that only its letters' shapes show that the two are one."""
    with pytest.raises(RoleConflictError, match="have the same operator"):
        load_federation(write(alpha={"operator": latin}, beta={"operator": other}))


@given(st.lists(st.sampled_from(BLANKS), min_size=8, max_size=8))
def test_rule_8_blanks_of_any_kind_do_not_count(blanks: list[str]) -> None:
    name = "Alpha AG"
    assert plain("".join(itertools.chain(*zip(blanks, name, strict=True)))) == plain(name) == "alphaag"


@cases(__file__, "no-names")
@pytest.mark.parametrize("field", ["name", "operator"])
def test_rule_8_a_name_of_mixed_scripts_or_without_a_letter_is_refused(write: Write, field: str, name: str) -> None:
    with pytest.raises(ConfigError, match=r"mixes letters|no visible characters"):
        load_federation(write(beta={field: name}))
    with pytest.raises(ConfigError, match=r"mixes letters|no visible characters"):
        load_federation(write(companies=[{"name": "H", "members": ["alpha", "beta"], "operators": [name]}]))


@cases(__file__, "names-of-one-script")
def test_names_of_one_script_are_names(write: Write, name: str) -> None:
    load_federation(write(beta={"operator": name}))


@cases(__file__, "spellings-of-one-address")
def test_rule_11_one_address_in_many_spellings(write: Write, spellings: list[str]) -> None:
    for one, other in itertools.combinations(spellings, 2):
        with pytest.raises(ConfigError, match="have the same address"):
            load_federation(write(alpha={"address": f"{one}:7401"}, beta={"address": f"{other}:7401"}))
    load_federation(write(alpha={"address": f"{spellings[0]}:7401"}, beta={"address": f"{spellings[1]}:7402"}))


def test_a_provider_may_have_several_addresses_each_once(write: Write) -> None:
    several = load_federation(write(alpha={"address": ["a:1", "a:2", "[::1]:3"]}))
    assert several.executors[0].addresses == (("a", 1), ("a", 2), ("::1", 3))
    assert not several.local
    assert load_federation(write(alpha={"address": ["localhost:1", "[::1]:2"]}, beta={"address": "[::1]:3"})).local
    for twice in (["a:1", "A.:01"], ["b:1", "localhost:1", "[::1]:1"]):
        with pytest.raises(ConfigError, match=r"provider 'alpha': address lists '.*:1' twice: remove one of them"):
            load_federation(write(alpha={"address": twice}))
    for none in ([], ["a:0"], [1], ["a:1"] * 65):
        with pytest.raises(ConfigError):
            load_federation(write(alpha={"address": none}))


def test_a_rotation_pins_both_certificates_of_one_party(write: Write, keys: Path) -> None:
    before = load_federation(write())
    during = load_federation(write(beta={"next_certificate": "keys/gamma.pem"}))
    after = load_federation(write(beta={"certificate": "keys/gamma.pem"}))
    assert during.helpers[0].pins == (keys / "beta.pem", keys / "gamma.pem")
    fingerprints = [federation.helpers[0].key_fingerprint for federation in (before, during, after)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


@cases(__file__, "one-company")
def test_rule_8_a_company_is_one_party(write: Write, companies: list[Any], gamma: dict[str, str] | None) -> None:
    """Refused if all helpers share every pad, and if the helper is needed; accepted if there is another helper."""
    parties = {"gamma": {"role": "executor", **(gamma or {})}, "companies": companies}
    with pytest.raises(RoleConflictError, match="'alpha' and helper 'beta' have the same company: together they could"):
        load_federation(write(**parties))
    with pytest.raises(RoleConflictError, match="executor 'alpha' has helpers of 0 companies other than its own"):
        load_federation(write(**parties, pads={"helpers": 1}))


@pytest.mark.parametrize("same", [{"certificate": "keys/alpha.pem"}, {"address": "A.:1"}], ids=str)
@pytest.mark.parametrize("name", ["certificate", "next_certificate"])
def test_rule_11_holds_with_pads_too(write: Write, same: dict[str, str], name: str) -> None:
    if "certificate" in same:
        same = {name: same["certificate"]}
    with pytest.raises(RoleConflictError, match="executor 'alpha' and helper 'beta' have the same"):
        load_federation(write(beta=same, gamma={}, pads={"helpers": 1}))
