"""`federation.toml`: accepted content, and refusals with their messages."""

from pathlib import Path
from typing import Any

import pytest

from symbiosis_priv.certificates.issuing import create_authority
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.errors import CertificateError, ConfigError
from symbiosis_priv.federation import load_federation
from tests.symbiosis_priv.federation.conftest import Write


def test_paths_are_relative_to_the_file_and_home_is_expanded(write: Write, keys: Path) -> None:
    federation = load_federation(write())
    assert [peer.certificate for peer in federation.peers] == [keys / "alpha.pem", keys / "beta.pem"]
    assert federation.tenant_certificate == keys / "alice.pem"
    assert federation.tenant_key == Path.home() / "alice.key"
    assert [peer.name for peer in (*federation.executors, *federation.helpers)] == ["alpha", "beta"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"digest": "sha256:ff"}}, "digest = 'sha256:ff' .* 64 hexadecimal digits"),
        ({"model": {"weight_bits": 40}}, "model.weight_bits"),
        ({"model": {"weigth_bits": 10}}, "weigth_bits"),
        ({"alpha": {"role": "boss"}}, r"provider\[0\].role"),
        ({"alpha": {"role": "helper"}}, "role = 'executor'"),
        ({"alpha": {"address": "a"}}, "provider 'alpha': address 'a' is not host:port"),
        ({"alpha": {"address": "a\0:1"}}, "is not host:port"),
        ({"alpha": {"certificate": "~nobody-of-that-name/alpha.pem"}}, "there is no such home folder"),
        ({"beta": {"address": "b:0"}}, "provider 'beta': port 0 is not valid"),
        ({"beta": {"name": "alpha"}}, "'alpha' and helper 'alpha' have the same name"),
        ({"beta": {"certificate": 7}}, r"provider\[1\].certificate"),
        ({"alpha": {"layers": "-4"}}, "provider 'alpha': layers = '-4' is not a range .* as in '0-15'"),
        ({"alpha": {"layers": "15-0"}}, "provider 'alpha': layers 15-0 is not a range: .* as in 0-15"),
        ({"alpha": {"layers": 4}}, r"provider\[0\].layers"),
        ({"pads": {}}, "pads"),
        ({"pads": {"helpers": 0}}, "pads.helpers"),
        ({"pads": {"relay": "yes"}}, "pads.relay"),
        ({"pads": {"helpers": -1}}, "pads.helpers"),
        ({"pads": {"helpers": True}}, "pads.helpers"),
        ({"pads": {"helpers": 2}}, "helpers = 2, and 1 .* have role = 'helper': add helpers, or lower it"),
        ({"pads": {"helpers": 1 << 62}}, "add helpers, or lower it"),
        ({"companies": [{"name": "H", "members": []}]}, "company 'H' has fewer than two members: list two or more"),
        ({"companies": [{"name": "H", "members": ["alpha"]}]}, "company 'H' has fewer than two members"),
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
    relaying = load_federation(write(pads={"relay": True}))
    assert (plain.relay, relaying.relay, relaying.pad_helpers) == (False, True, None)
    assert [peer.layers for peer in plain.peers] == [None, None]
