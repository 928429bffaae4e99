"""The plain model with rounded weights: the providers' integers, and the closest model to a split one."""

from pathlib import Path

import pytest
import torch

from symbiosis_priv.checkpoints.weights import WeightStore
from tenant import rounded_model


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_its_weights_are_the_providers_integers(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A channel's largest weight is a whole multiple of its scale, so quantising again gives the same integers."""
    path: Path = request.getfixturevalue(name)
    rounded_model(path).save_pretrained(tmp_path / "rounded")
    store, again = WeightStore(path), WeightStore(tmp_path / "rounded", cache=tmp_path / "cache")
    for index in range(len(store.manifest().groups)):
        assert torch.equal(again.group(index).weight, store.group(index).weight)
