"""`federation.toml`: what is accepted, what is refused with which words, and rule 8 however the file is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from symbiosis_priv.certificates import Kind, create_self_signed
from symbiosis_priv.errors import ConfigError, RoleConflictError
from symbiosis_priv.federation import load_federation, parse_address

Write = Callable[..., Path]
DIGEST = "sha256:" + "0" * 64


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Self-signed certificates of two providers."""
    folder = tmp_path_factory.mktemp("federation") / "keys"
    for name in ("alpha", "beta"):
        create_self_signed(folder, kind=Kind.PROVIDER, name=name)
    return folder


@pytest.fixture
def write(keys: Path) -> Write:
    """Writes a good federation.toml beside `keys`, with changes: tables of it, or entries of its two providers."""

    def section(header: str, entries: dict[str, Any]) -> str:
        return "\n".join([header, *(f"{key} = {json.dumps(value)}" for key, value in entries.items()), ""])

    def write(*, model: Any = None, alpha: Any = None, beta: Any = None) -> Path:
        one = {"name": "alpha", "operator": "A", "role": "executor", "address": "a:1", "certificate": "keys/alpha.pem"}
        two = {"name": "beta", "operator": "B", "role": "helper", "address": "b:1", "certificate": "keys/beta.pem"}
        path = keys.parent / "federation.toml"
        sections = [
            section("[model]", {"digest": DIGEST, **(model or {})}),
            section("[tenant]", {"certificate": "keys/alice.pem", "key": "~/alice.key"}),
            section("[[provider]]", {**one, **(alpha or {})}),
            section("[[provider]]", {**two, **(beta or {})}),
        ]
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
        ({"beta": {"name": "alpha"}}, "share a name"),
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
    ("beta", "shared"),
    [
        ({"operator": " a "}, "operator"),
        ({"certificate": "keys/alpha.pem"}, "certificate"),
        ({"certificate": "keys/both.pem"}, "certificate"),
        ({"address": "A:1"}, "address"),
    ],
    ids=str,
)
def test_rule_8_however_it_is_written(write: Write, keys: Path, beta: dict[str, str], shared: str) -> None:
    """Also where the executor's certificate stands second in the helper's file, as after a rotation."""
    both = (keys / "beta.pem").read_text() + (keys / "alpha.pem").read_text()
    (keys / "both.pem").write_text(both)
    with pytest.raises(RoleConflictError, match=f"same {shared}"):
        load_federation(write(beta=beta))


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
