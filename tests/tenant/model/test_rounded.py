"""The plain model with rounded weights: the providers' integers, and the closest model to a split one."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from symbiosis_priv.checkpoints.weights import WeightStore
from tenant import rounded_model
from tests.splitting import logits, split_model

IDS = torch.arange(1, 21).view(2, 10)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_its_weights_are_the_providers_integers(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A channel's largest weight is a whole multiple of its scale, so quantising again gives the same integers."""
    path: Path = request.getfixturevalue(name)
    rounded_model(path).save_pretrained(tmp_path / "rounded")
    store, again = WeightStore(path), WeightStore(tmp_path / "rounded", cache=tmp_path / "cache")
    for index in range(len(store.manifest().groups)):
        assert torch.equal(again.group(index).weight, store.group(index).weight)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_split_model_is_closer_to_it_than_to_the_checkpoints_model(name: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(name)
    models = split_model(path), rounded_model(path), AutoModelForCausalLM.from_pretrained(path)
    split, rounded, own = (logits(model, IDS) for model in models)
    assert (split - rounded).norm() < (split - own).norm() / 10
