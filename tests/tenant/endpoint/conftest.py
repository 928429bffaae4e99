"""A tiny Llama for the endpoint, and adapters."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from tenant.model.loading import load_language_model, load_tokenizer
from tests.adapters import write_adapter


@pytest.fixture(scope="session")
def checkpoint(tiny: Path) -> Path:
    return tiny


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Any:
    return load_tokenizer(checkpoint)


@pytest.fixture(scope="session")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two adapters, `lora` and `other`."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("lora", "other")):
        config = LoraConfig(target_modules="all-linear")
        write_adapter(load_language_model(checkpoint), folder / name, config, seed=seed, scale=0.2)
    return folder
