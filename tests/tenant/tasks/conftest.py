"""Task folders of several methods for the small Llama, and the model that serves them."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    C3AConfig,
    FourierFTConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    RandLoraConfig,
    RoadConfig,
    VeraConfig,
    get_peft_model,
)

from tenant.model.loading import load_model
from tenant.tasks.methods import BottleneckConfig, DiffPruningConfig

ATTENTION = ["q_proj", "v_proj"]
OUTPUTS = ["o_proj", "down_proj"]
METHODS: dict[str, PeftConfig] = {
    "lora": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=["lm_head"]),
    "lora-b": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=["lm_head"]),
    "lora-r8": LoraConfig(r=8, target_modules=ATTENTION),
    "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "ia3-b": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": OFTConfig(oft_block_size=8, target_modules=ATTENTION),
    "oft-b": OFTConfig(oft_block_size=8, target_modules=ATTENTION),
    "vera": VeraConfig(r=16, target_modules=ATTENTION),
    "vera-b": VeraConfig(r=16, target_modules=ATTENTION),
    "bottleneck": BottleneckConfig(bottleneck_dim=6, target_modules=OUTPUTS),
    "bottleneck-b": BottleneckConfig(bottleneck_dim=6, target_modules=OUTPUTS),
    "diff-pruning": DiffPruningConfig(density=0.05, target_modules=ATTENTION),
    "loha": LoHaConfig(r=4, target_modules=ATTENTION),
    "lokr": LoKrConfig(r=4, target_modules=ATTENTION),
    "road": RoadConfig(group_size=16, target_modules=ATTENTION),
    "fourierft": FourierFTConfig(n_frequency=40, target_modules=ATTENTION),
    "c3a": C3AConfig(block_size=16, target_modules=ATTENTION),
    "randlora": RandLoraConfig(r=4, target_modules=ATTENTION),
}
"""By task name: the configuration of a PEFT method."""

WriteTask = Callable[..., Path]


@pytest.fixture(scope="session")
def write_task(llama: Path) -> WriteTask:
    """`write_task(folder, config, seed=0)`: a task folder with random parameters."""
    base = load_model(llama, dtype=torch.float32)

    def write(folder: Path, config: PeftConfig, *, seed: int = 0) -> Path:
        torch.manual_seed(seed)
        adapted: Any = get_peft_model(copy.deepcopy(base), copy.deepcopy(config))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        adapted.save_pretrained(str(folder))
        return folder

    return write


@pytest.fixture(scope="session")
def folders(write_task: WriteTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of task folders: one per entry of `METHODS`."""
    repository = tmp_path_factory.mktemp("tasks")
    for (name, config), seed in zip(METHODS.items(), itertools.count()):
        write_task(repository / name, config, seed=seed)
    return repository
