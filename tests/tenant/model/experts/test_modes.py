"""The default mode, what is said about it, and refusals."""

import logging
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoModelForCausalLM

from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError, ConfigError, UnsupportedModelError
from tenant import RemoteConfig, backend_of
from tenant.model.experts.stack import OffloadedStack
from tenant.preparation.slim import write_slim
from tests.experts import DBRX, write


def load(path: Path, **options: Any) -> Any:
    config = RemoteConfig(masking="simulate", **options)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config)


def test_experts_at_a_low_price_are_offloaded_by_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write("Mixtral", tmp_path, num_experts_per_tok=1)
    with caplog.at_level(logging.INFO, "tenant.model.experts.modes"):
        model = load(path)
    with backend_of(model):
        assert "experts='all'" in caplog.text
        assert "x4" in caplog.text
        assert any(isinstance(parameter, OffloadedStack) for parameter in model.parameters())


def test_experts_at_a_high_price_stay_by_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write("Mixtral", tmp_path, num_local_experts=8, num_experts_per_tok=1)
    with caplog.at_level(logging.INFO, "tenant.model.experts.modes"):
        model = load(path)
    with backend_of(model):
        assert "experts='local'" in caplog.text
        assert "x8" in caplog.text
        assert "memory" in caplog.text
        assert not any(isinstance(parameter, OffloadedStack) for parameter in model.parameters())


def test_experts_outside_the_interface_stay_or_are_refused_by_name(tmp_path: Path) -> None:
    config = transformers.DbrxConfig(**deepcopy(DBRX))
    transformers.DbrxForCausalLM(config).save_pretrained(tmp_path)
    backend_of(load(tmp_path)).close()
    with pytest.raises(UnsupportedModelError, match=r"DbrxExperts.*experts='local'"):
        load(tmp_path, experts="all")


def test_a_slim_checkpoint_has_experts_only_if_it_is_made_with_them(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers would make them at random, with a warning."""
    path = checkpoint("Mixtral")
    store = WeightStore(path)
    write_slim(store, store.manifest(), tmp_path / "slim")
    backend_of(load(tmp_path / "slim", checkpoint=path, experts="all")).close()
    write_slim(store, store.manifest(), tmp_path / "with experts", keep_experts=True)
    backend_of(load(tmp_path / "with experts", checkpoint=path, experts="local")).close()
    with pytest.raises(CheckpointError, match=r"experts.*full checkpoint"):
        load(tmp_path / "slim", checkpoint=path, experts="local")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="experts"):
        RemoteConfig(masking="simulate", experts="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="counts"):
        RemoteConfig(masking="simulate", show_routes_while_decoding=True)


def test_a_model_without_experts_has_no_mode(caplog: pytest.LogCaptureFixture, save_llama: Any) -> None:
    with caplog.at_level(logging.INFO, "tenant.model.experts.modes"), backend_of(load(save_llama(), experts="all")):
        assert not caplog.text
