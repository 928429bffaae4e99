"""Adapters of several methods with random parameters."""

import copy
from pathlib import Path
from typing import Any

import peft
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from tenant.tasks.methods import BottleneckConfig, DiffPruningConfig

ATTENTION = ["q_proj", "v_proj"]
OUTPUTS = ["o_proj", "down_proj"]
METHODS: dict[str, peft.PeftConfig] = {
    "lora": peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=["lm_head"]),
    "lora-r8": peft.LoraConfig(r=8, target_modules=ATTENTION),
    "ia3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": peft.OFTConfig(oft_block_size=8, target_modules=ATTENTION),
    "vera": peft.VeraConfig(r=16, target_modules=ATTENTION),
    "bottleneck": BottleneckConfig(bottleneck_dim=6, target_modules=OUTPUTS),
    "diff-pruning": DiffPruningConfig(density=0.05, target_modules=ATTENTION),
    "loha": peft.LoHaConfig(r=4, target_modules=ATTENTION),
    "lokr": peft.LoKrConfig(r=4, target_modules=ATTENTION),
    "road": peft.RoadConfig(group_size=16, target_modules=ATTENTION),
    "fourierft": peft.FourierFTConfig(n_frequency=40, target_modules=ATTENTION),
    "c3a": peft.C3AConfig(block_size=16, target_modules=ATTENTION),
    "randlora": peft.RandLoraConfig(r=4, target_modules=ATTENTION),
}
"""By task name: the configuration of a PEFT method."""
METHODS |= {f"{name}-b": METHODS[name] for name in ("lora", "ia3", "oft", "vera", "bottleneck")}


def peft_config(kind: str, **options: Any) -> Any:
    """A configuration from a table of cases: `kind` is the name of the method's type."""
    return PEFT_TYPE_TO_CONFIG_MAPPING[getattr(peft.PeftType, kind)](**options)


def write_adapter(base: Any, folder: Path, config: peft.PeftConfig, *, seed: int = 0, scale: float = 0.1) -> Any:
    """Put an adapter on a model, add random numbers to its parameters, and save it. Returns the adapted model."""
    torch.manual_seed(seed)
    adapted: Any = peft.get_peft_model(base, copy.deepcopy(config))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * scale)
    adapted.save_pretrained(str(folder))
    return adapted
