"""provider.toml: the template loads, every mistake names its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from provider.config import Limits, ProviderConfig, from_json, load, template, to_json
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


NO_DEFAULT = (
    *("cache", "layers", "threads", "revoked", "requests_per_s", "rows_per_s", "giga_", "max_rows_in_flight"),
    *("weight =", "database", 'listen = "127.0.0.1:9464'),
    *("announce =", "authority =", "address =", "capacity_layers"),
)


def written(folder: Path, text: str) -> Path:
    path = folder / "provider.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_template_shows_the_defaults(tmp_path: Path) -> None:
    """Uncommenting every default of the template changes nothing but what has no default."""
    (tmp_path / "model").mkdir()
    plain = load(written(tmp_path, template()))
    lines = []
    for line in template().splitlines():
        shown = line.removeprefix("# ")
        optional = line.startswith("# ") and " = " in line and not shown.startswith(NO_DEFAULT)
        lines.append(shown if optional else line)
    assert load(written(tmp_path, "\n".join(lines))) == plain
    assert plain.limits == Limits()
    assert plain.model.checkpoint == str((tmp_path / "model").resolve())
    assert plain.tls.certificate == tmp_path / "keys/alpha.pem"


def test_everything_else_is_optional(tmp_path: Path) -> None:
    config = load(written(tmp_path, MINIMAL))
    assert config.roles == ("executor",)
    assert config.model.checkpoint == "model"  # no such folder: a name on the hub
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
        ("name =", "provider.toml"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(written(tmp_path, change))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "none.toml")


def test_child_configuration_is_checked() -> None:
    with pytest.raises(ConfigError):
        from_json(b"{}")


def test_types_survive_the_pipe(tmp_path: Path) -> None:
    config: ProviderConfig = from_json(to_json(load(written(tmp_path, MINIMAL))))
    assert isinstance(config.tls.key, Path)
