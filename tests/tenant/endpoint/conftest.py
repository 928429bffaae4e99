"""A tiny Llama with a byte-level tokenizer, for the endpoint."""

from pathlib import Path
from typing import Any

import pytest

from symbiosis_priv.harness.base_model import Pretraining, make_base_model
from tenant.model.loading import load_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = Pretraining(steps=4, batch=2, window=16, sentences=300, vocab=320, width=64, blocks=2)
    return make_base_model(tmp_path_factory.mktemp("endpoint") / "tiny", recipe=recipe)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Any:
    return load_tokenizer(checkpoint)
