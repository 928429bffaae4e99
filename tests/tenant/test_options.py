"""`RemoteConfig`: mistakes are immediate errors, and files that transformers writes contain no object of ours."""

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers.quantizers.auto import AutoQuantizationConfig

from symbiosis_priv.checkpoints.vetting import QUANT_METHOD
from symbiosis_priv.errors import CheckpointError, ConfigError
from tenant import RemoteConfig
from tenant.masking.registry import registered
from tests.cases import cases


def test_masked_by_default() -> None:
    config = RemoteConfig(federation="federation.toml")
    assert config.masking == "pad"


@pytest.mark.parametrize("masking", [scheme.name for scheme in registered()])
def test_every_scheme_but_simulate_needs_a_federation(masking: str) -> None:
    if masking == "simulate":
        RemoteConfig(masking=masking)
    else:
        with pytest.raises(ConfigError, match=r"needs RemoteConfig\(federation='federation.toml'\)"):
            RemoteConfig(masking=masking)


@cases(__file__, "mistakes")
def test_mistakes_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RemoteConfig(**{"federation": "federation.toml", **options})


def test_transformers_cannot_make_one_from_a_folders_entry() -> None:
    for make in (AutoQuantizationConfig.from_dict, RemoteConfig.from_dict):
        with pytest.raises(CheckpointError, match=r"pass RemoteConfig\(\.\.\.\) yourself"):
            make({"quant_method": QUANT_METHOD, "masking": "simulate"})


def test_a_copy_is_the_same_object() -> None:
    """transformers copies its configurations; the object that the caller passed must be used."""
    config = RemoteConfig(federation="federation.toml")
    assert copy.deepcopy(config) is config
    assert copy.deepcopy({"quantization_config": config})["quantization_config"] is config


def test_only_a_name_is_written() -> None:
    config = RemoteConfig(federation=Path("secret/federation.toml"), cache=Path("secret/cache"))
    assert config.to_dict() == {"quant_method": QUANT_METHOD}
    assert "secret" not in config.to_json_string(use_diff=False) + config.to_json_string()
