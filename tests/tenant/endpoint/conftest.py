"""A tiny Llama for the endpoint, and adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tenant.model.loading import load_language_model, load_tokenizer


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
        torch.manual_seed(seed)
        adapted: Any = get_peft_model(load_language_model(checkpoint), LoraConfig(target_modules="all-linear"))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        adapted.save_pretrained(folder / name)
    return folder
