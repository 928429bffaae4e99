"""A split model beside the plain one, and one adapter trained on both.

The checkpoints hold integers times a scale, so quantising changes no weight, and a split model differs from the plain
one by the rounding of rows only.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor

from tenant import rounded_model
from tenant.model.loading import load_adapter, load_model
from tests import splitting
from tests.splitting import split_model

IDS = torch.arange(3, 19).view(2, 8) * 7 % 96


@pytest.fixture(scope="session")
def exact_llama(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact-llama")
    rounded_model(llama).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def exact_gpt2(gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact-gpt2")
    rounded_model(gpt2).save_pretrained(folder)
    return folder


@functools.cache
def _loaded(folder: Path, split: bool) -> Any:
    return split_model(folder) if split else load_model(folder, dtype=torch.float32)


def load(folder: Path, *, split: bool) -> Any:
    """A new copy of the model in a folder, split (masking "simulate") or plain, in evaluation mode."""
    return copy.deepcopy(_loaded(folder, split))


@dataclass
class Trained:
    """An adapted model after some steps."""

    model: Any
    losses: list[float]
    logits: Tensor
    effect: Tensor


def logits(model: Any) -> Tensor:
    return splitting.logits(model.eval(), IDS)


def trained(base: Any, config: PeftConfig, *, steps: int = 2) -> Trained:
    """Put an adapter on a model, move it away from its start, and train it."""
    without = logits(base)
    torch.manual_seed(3)
    model: Any = get_peft_model(base, config)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    losses = []
    for step in range(steps):
        torch.manual_seed(20 + step)
        loss = model.train()(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    found = logits(model)
    return Trained(model, losses, found, (found - without).abs().max())


def same_everywhere(config: Callable[[], PeftConfig], checkpoint: Path, folder: Path) -> None:
    """Train an adapter split and plain, save both, load both split and plain.

    Rounding rows changes a logit by some 2^-20 of a row per layer. After the training steps, the difference
    stays below 1 % of the adapter's effect. An adapter that is ignored in one layer makes a larger difference.
    """
    split = trained(load(checkpoint, split=True), config())
    plain = trained(load(checkpoint, split=False), config())
    assert split.effect > 1e-3
    assert split.losses == pytest.approx(plain.losses, rel=1e-4)
    bound = 0.01 * plain.effect
    assert (split.logits - plain.logits).abs().max() <= bound
    for how, made in (("split", split), ("plain", plain)):
        made.model.save_pretrained(str(folder / how))
        for loaded in (
            load_adapter(load(checkpoint, split=True), folder / how),
            PeftModel.from_pretrained(load(checkpoint, split=False), str(folder / how)).eval(),
        ):
            assert (logits(loaded) - made.logits).abs().max() <= bound, how
