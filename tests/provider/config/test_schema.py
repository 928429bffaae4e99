"""provider.toml: every mistake names its key, and a configuration can be sent to another process."""

from pathlib import Path

import pytest

from provider.config.provider_toml import load
from provider.config.schema import ProviderConfig, from_json, to_json
from symbiosis_priv.errors import ConfigError

MINIMAL = """
name = "alpha"
[model]
checkpoint = "model"
[tls]
certificate = "alpha.pem"
key = "alpha.key"
tenant_authority = "authority.pem"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "provider.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_other_keys_are_optional(tmp_path: Path) -> None:
    config = load(written(tmp_path, MINIMAL))
    assert config.roles == ("executor",)
    assert config.model.checkpoint == "model"  # no such folder, so it is a name on the hub
    assert from_json(to_json(config)) == config


def test_paths_of_relays_are_relative_to_the_file(tmp_path: Path) -> None:
    relay = '[relay]\nto = [{ address = "a.example:1", certificate = "keys/a.pem" }]\nfrom = ["keys/b.pem"]'
    config = load(written(tmp_path, f'roles = ["executor", "helper"]\n{MINIMAL}{relay}'))
    assert config.relay.to[0].certificate == tmp_path / "keys/a.pem"
    assert config.relay.helpers == (tmp_path / "keys/b.pem",)
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("colour = 1\n" + MINIMAL, "colour"),
        (MINIMAL + "pin = 1", "pin"),
        (MINIMAL.replace('key = "alpha.key"', ""), "key"),
        (MINIMAL.replace('"alpha.key"', "3"), "key"),
        ('roles = ["boss"]\n' + MINIMAL, "roles"),
        ("roles = []\n" + MINIMAL, "roles"),
        ('listen = "nowhere"\n' + MINIMAL, "nowhere"),
        (MINIMAL + "[limits]\nmax_rows = 0", "max_rows"),
        (MINIMAL + "[limits]\nidle_timeout_s = -1.0", "idle_timeout_s"),
        (MINIMAL + "[limits]\nmax_payload_mib = 1000", "max_inflight_mib_per_tenant"),
        (MINIMAL + "[limits]\nmax_inflight_mib = 600", "max_inflight_mib"),
        (MINIMAL + '[executor]\nkernel = "fast"', "kernel"),
        (MINIMAL + '[executor]\nendpoint = "tcp://0.0.0.0:1"', "endpoint"),
        (MINIMAL + f'[executor]\nendpoint = "ipc:///{"x" * 100}"', "endpoint"),
        (MINIMAL.replace("[tls]", "weight_bits = 40\n[tls]"), "weight_bits"),
        (MINIMAL + '[relay]\nto = [{ address = "alpha.example:1", certificate = "a.pem" }]', '"helper" to roles'),
        ('roles = ["helper"]\n' + MINIMAL + '[relay]\nfrom = ["b.pem"]', '"executor" to roles'),
        (
            'roles = ["helper"]\n' + MINIMAL + '[relay]\nto = [{ address = "alpha", certificate = "a.pem" }]',
            "host:port",
        ),
        (MINIMAL + "[relay]\nhelpers = []", "known are to, from, memory_mib"),
        ("name =", "provider.toml"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(written(tmp_path, change))


def test_child_configuration_is_checked() -> None:
    with pytest.raises(ConfigError):
        from_json(b"{}")


def test_types_survive_the_pipe(tmp_path: Path) -> None:
    config: ProviderConfig = from_json(to_json(load(written(tmp_path, MINIMAL))))
    assert isinstance(config.tls.key, Path)
