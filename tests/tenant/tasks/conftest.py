"""Task folders of several methods for the small Llama, and the model that serves them."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftConfig

from tenant.model.loading import load_model
from tests.adapters import METHODS, write_adapter

WriteTask = Callable[..., Path]


@pytest.fixture(scope="session")
def write_task(llama: Path) -> WriteTask:
    """`write_task(folder, config, seed=0)`: a task folder with random parameters."""
    base = load_model(llama, dtype=torch.float32)

    def write(folder: Path, config: PeftConfig, *, seed: int = 0) -> Path:
        write_adapter(copy.deepcopy(base), folder, config, seed=seed)
        return folder

    return write


@pytest.fixture(scope="session")
def folders(write_task: WriteTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of task folders: one per entry of `METHODS`."""
    repository = tmp_path_factory.mktemp("tasks")
    for (name, config), seed in zip(METHODS.items(), itertools.count()):
        write_task(repository / name, config, seed=seed)
    return repository
