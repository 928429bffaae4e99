"""Killed providers: training waits for them, continues without help, and ends with the same bits."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from symbiosis_priv.errors import DeadlineExceededError
from symbiosis_priv.harness.local import LocalFederation
from tenant import backend_of
from tests.end_to_end.comparing import Killer, adapter_of, config_for, equal
from tests.end_to_end.conftest import Open, Train

STEPS = 3


@pytest.fixture
def undisturbed(
    llama: Path,
    llama_federation: LocalFederation,
    open_model: Open,
    train: Train,
    simulated: dict[tuple[Any, ...], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """The simulation's adapter."""
    if (llama, "adapter") not in simulated:
        reference = open_model(llama, config_for(llama_federation, "simulate"))
        train(reference, steps=STEPS)
        simulated[llama, "adapter"] = adapter_of(reference)
    return simulated[llama, "adapter"]


@pytest.mark.parametrize(
    ("name", "frame"),
    [
        pytest.param("executor", 22, id="executor, forward"),
        pytest.param("executor", 30, id="executor, backward"),
        pytest.param("helper-1", 20, id="helper"),
    ],
)
def test_training_continues_when_a_killed_provider_is_restarted(
    llama: Path,
    llama_federation: LocalFederation,
    open_model: Open,
    train: Train,
    undisturbed: dict[str, Tensor],
    name: str,
    frame: int,
) -> None:
    killer = Killer(llama_federation, name, frame=frame)
    model = open_model(llama, config_for(llama_federation, "pad-1", wiretap=killer))
    train(model, steps=STEPS)
    killer.starting.join(120)
    assert killer.before != llama_federation.pid(name)
    assert killer.left < 0
    assert equal(adapter_of(model), undisturbed)
    assert backend_of(model).products.ledger().answers_rejected == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["executor", "helper-1"])
def test_a_provider_that_stays_away_is_an_error_within_the_deadline(
    llama: Path, llama_federation: LocalFederation, open_model: Open, name: str
) -> None:
    """When the provider is back, the same model works again."""
    deadline_s = 3.0
    model = open_model(llama, config_for(llama_federation, "pad-1", deadline_s=deadline_s))
    ids = torch.arange(3, 63).view(1, 60)
    began = [time.monotonic()]

    def infer() -> Tensor:
        for _ in range(4):  # the first step may still use pads that were drawn before
            began.append(time.monotonic())
            with torch.no_grad():
                logits: Tensor = model(input_ids=ids).logits
        return logits

    expected = infer()
    llama_federation.kill(name)
    try:
        with pytest.raises(DeadlineExceededError, match=r"within 3 s.*RemoteConfig\(deadline_s=\.\.\.\)"):
            infer()
        # a pass has 9 groups: all are answered immediately, except for the one that exceeded its deadline
        assert deadline_s / 2 < time.monotonic() - began[-1] < 8 * deadline_s
    finally:
        llama_federation.restart(name)
    assert torch.equal(infer(), expected)
