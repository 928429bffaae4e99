"""A provider serves the missing layers: the tenant finds it in a registry, and the bits are exact."""

from collections.abc import Callable
from pathlib import Path

import pytest

from symbiosis_priv.errors import UncoveredError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig
from tests.end_to_end.comparing import adapter_of, equal
from tests.end_to_end.conftest import Open, Train


def test_missing_layers_are_an_error_before_training_and_a_joining_provider_serves_them(
    save_llama: Callable[..., Path], tmp_path: Path, open_model: Open, train: Train
) -> None:
    llama = save_llama(num_hidden_layers=3, pad_token_id=0)
    options = {"executor": {"threads": 1}, "registry": {"capacity_layers": 1}}
    layers = {"executor-1": "0", "executor-2": "1"}
    with LocalFederation(
        llama, tmp_path / "run", executors=2, layers=layers, registry=True, provider_options=options
    ) as local:
        listed = load_federation(local.federation)
        model = open_model(llama, RemoteConfig(federation=local.federation, deadline_s=30.0))
        before = adapter_of(model)
        with pytest.raises(UncoveredError, match="no executor serves layers 2 of this model"):
            train(model, steps=2)
        assert equal(adapter_of(model), before)

        local.add("newcomer", layers="auto", listed=False)
        assert '"layers": "2"' in local.logs("newcomer")
        assert load_federation(local.federation) == listed
        train(model, steps=2)
        reference = open_model(llama, RemoteConfig(masking="simulate"))
        train(reference, steps=2)
        assert equal(adapter_of(model), adapter_of(reference))
