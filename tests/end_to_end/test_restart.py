"""Killed providers: training waits for them, continues without help, and ends with the same bits."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from symbiosis_priv.errors import DeadlineExceededError
from symbiosis_priv.federation import Peer
from symbiosis_priv.harness.local import LocalFederation
from symbiosis_priv.network import wire
from tenant import backend_of
from tests.end_to_end.comparing import adapter_of, config_for, equal
from tests.end_to_end.conftest import Open, Train

NAMES = {"executor": "executor", "helper": "helper-1"}


class Assassin:
    """A wiretap that kills a provider with SIGKILL just before a certain frame is sent, and restarts it.

    The frame is lost in the middle of a step's forward or backward pass.
    """

    def __init__(self, federation: LocalFederation, role: wire.Role, *, frame: int) -> None:
        self.federation, self.role, self.frame = federation, role, frame
        self.count = 0
        self.before = federation.pid(NAMES[role])
        self.starting = threading.Thread(target=federation.restart, args=(NAMES[role],))

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        if peer.name == NAMES[self.role]:
            self.count += 1
            if self.count == self.frame:
                self.federation.kill(peer.name)
                self.starting.start()

    def received(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None: ...


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
    ("role", "frame"),
    [
        pytest.param("executor", 22, id="executor, forward"),
        pytest.param("executor", 30, id="executor, backward"),
        pytest.param("helper", 20, id="helper"),
    ],
)
def test_training_continues_when_a_killed_provider_is_restarted(
    llama: Path,
    llama_federation: LocalFederation,
    open_model: Open,
    train: Train,
    undisturbed: dict[str, Tensor],
    role: wire.Role,
    frame: int,
) -> None:
    assassin = Assassin(llama_federation, role, frame=frame)
    model = open_model(llama, config_for(llama_federation, "pad-1", wiretap=assassin))
    train(model, steps=STEPS)
    assassin.starting.join(120)
    assert assassin.before != llama_federation.pid(NAMES[role])
    assert assassin.count > frame
    assert equal(adapter_of(model), undisturbed)
    assert backend_of(model).products.ledger().answers_rejected == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("role", ["executor", "helper"])
def test_a_provider_that_stays_away_is_an_error_within_the_deadline(
    llama: Path, llama_federation: LocalFederation, open_model: Open, role: wire.Role
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
    llama_federation.kill(NAMES[role])
    try:
        with pytest.raises(DeadlineExceededError, match=r"within 3 s.*RemoteConfig\(deadline_s=\.\.\.\)"):
            infer()
        # a pass has 9 groups: all are answered immediately, except for the one that exceeded its deadline
        assert deadline_s / 2 < time.monotonic() - began[-1] < 8 * deadline_s
    finally:
        llama_federation.restart(NAMES[role])
    assert torch.equal(infer(), expected)
