"""`RemoteConfig`: what is wrong is said at once, what transformers writes down holds no object of ours."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.quantizers.auto import AutoQuantizationConfig

from symbiosis_priv.errors import ConfigError
from tenant import RemoteConfig
from tenant.config import QUANT_METHOD
from tenant.masking.registry import registered


def test_masked_by_default() -> None:
    config = RemoteConfig(federation="federation.toml")
    assert config.masking == "pad"
    assert config.verify_columns == 16


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        RemoteConfig("federation.toml")  # type: ignore[call-arg]


@pytest.mark.parametrize("masking", [scheme.name for scheme in registered()])
def test_every_scheme_but_simulate_needs_a_federation(masking: str) -> None:
    if masking == "simulate":
        RemoteConfig(masking=masking)
    else:
        with pytest.raises(ConfigError, match=r"needs federation = 'federation.toml'"):
            RemoteConfig(masking=masking)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"masking": "magic"}, "masking = 'magic' is unknown; choose one of pad, local, none"),
        ({"weight_bits": 8}, "weight_bits is for masking = 'simulate'"),
        ({"deadline_s": 0}, "deadline_s = 0 is below"),
        ({"deadline_s": float("nan")}, "deadline_s = nan is below"),
        ({"pool_memory_mib": -1}, "pool_memory_mib = -1 is below 0"),
        ({"verify_columns": 7}, "verify_columns = 7 is below 8"),
        ({"paper_pool_size": 0}, "paper_pool_size = 0 is below 1"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RemoteConfig(**{"federation": "federation.toml", **options})


def test_transformers_knows_it_by_name() -> None:
    config = AutoQuantizationConfig.from_dict({"quant_method": QUANT_METHOD, "masking": "simulate", "weight_bits": 8})
    assert config == RemoteConfig(masking="simulate", weight_bits=8)


def test_a_copied_configuration_has_the_same_wiretap() -> None:
    """transformers copies it on the way to the model."""

    class Tap:
        def sent(self, *frame: Any) -> None: ...

        def received(self, *frame: Any) -> None: ...

    config = RemoteConfig(federation="federation.toml", wiretap=Tap())
    twin = copy.deepcopy(config)
    assert twin is not config
    assert twin.wiretap is config.wiretap


def test_what_is_written_down_is_plain_and_holds_no_wiretap() -> None:
    class Tap:
        def sent(self, *frame: Any) -> None: ...

        def received(self, *frame: Any) -> None: ...

    config = RemoteConfig(federation=Path("federation.toml"), cache=Path("cache"), wiretap=Tap())
    written = config.to_dict()
    assert "wiretap" not in written
    assert written["federation"] == "federation.toml"
    json.dumps(written)


def test_options_are_named_as_the_user_writes_them() -> None:
    code = RemoteConfig(federation="federation.toml")
    shell = RemoteConfig(federation="federation.toml", surface="command line")
    assert code.option("deadline_s") == "RemoteConfig(deadline_s=...)"
    assert code.option("checkpoint", "FULL") == "RemoteConfig(checkpoint='FULL')"
    assert shell.option("deadline_s") == "--deadline-s"
    assert shell.option("checkpoint", "FULL") == "--checkpoint FULL"
