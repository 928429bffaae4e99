"""Errors of configuration files."""

from pathlib import Path

import pytest

from provider.config.schema import ProviderConfig
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.system.toml import load_toml


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("nme = 1", "did you mean name? known are name, listen, "),
        ("[executor]\nkernl = 1", "kernel, threads"),
        ("[tenants.alice]\nrows = 1", "rows_per_s"),
    ],
)
def test_an_unknown_field_comes_with_the_known_ones(text: str, known: str, tmp_path: Path) -> None:
    (tmp_path / "provider.toml").write_text(text)
    with pytest.raises(ConfigError, match="unknown field") as raised:
        load_toml(tmp_path / "provider.toml", ProviderConfig, made_by="provider init")
    assert known in str(raised.value)


def test_an_unknown_field_in_a_list(tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text('[[provider]]\nnme = "alpha"\n')
    with pytest.raises(ConfigError, match=r"known are .*operator.*certificate"):
        load_federation(tmp_path / "federation.toml")


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('roles = ["exec"]', "'executor', 'helper'"),
        ('log_level = "all"', "'debug', 'info', 'warning'"),
        ('[executor]\nsharding = "rows"', "'auto', 'columns', 'gathered'"),
    ],
)
def test_an_unknown_value_comes_with_the_allowed_ones(text: str, allowed: str, tmp_path: Path) -> None:
    (tmp_path / "provider.toml").write_text(f'name = "alpha"\n{text}')
    with pytest.raises(ConfigError) as raised:
        load_toml(tmp_path / "provider.toml", ProviderConfig, made_by="provider init")
    assert sorted(allowed.split(", ")) == sorted(str(raised.value).partition("choose one of ")[2].split(", "))


def test_a_missing_file_comes_with_the_command_that_writes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="federation init"):
        load_federation(tmp_path / "federation.toml")
