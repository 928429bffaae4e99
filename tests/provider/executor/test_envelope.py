"""What the gateway tells its executor of a request."""

from __future__ import annotations

import pytest

from provider.executor.envelope import Stages
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.network import wire


def ask(direction: Direction, rows: int) -> wire.Execute:
    return wire.Execute(nonce=bytes(16), group=0, direction=direction, arithmetic="ring", rows=rows)


def test_few_rows_forward_are_inference_unless_they_are_half_of_a_step() -> None:
    chat, trainer = Stages(16), Stages(16)
    assert trainer.of(ask("forward", 2), 0.0) == "inference"  # nothing is known yet
    assert trainer.of(ask("backward", 2), 1.0) == "fine_tuning"
    assert trainer.of(ask("forward", 2), 2.0) == "fine_tuning"
    assert chat.of(ask("forward", 2), 2.0) == "inference"  # another connection, perhaps of the same tenant
    assert chat.of(ask("forward", 17), 2.0) == "fine_tuning"
    assert chat.of(ask("forward", 16), 3.0) == "inference"


@pytest.mark.parametrize(("later", "stage"), [(59.0, "fine_tuning"), (61.0, "inference")])
def test_who_has_ended_training_generates(later: float, stage: str) -> None:
    stages = Stages(16)
    stages.of(ask("backward", 2), 0.0)
    assert stages.of(ask("forward", 1), later) == stage
