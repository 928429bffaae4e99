"""The stage of a request in the gateway's message to its executor."""

import pytest

from provider.executor.envelope import Stages
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity


def ask(direction: Direction, rows: int) -> wire.Execute:
    return wire.Execute(nonce=bytes(16), group=0, direction=direction, arithmetic="ring", rows=rows)


ALICE, BOB = (TenantIdentity(name, authority="sha256:a") for name in ("alice", "bob"))


def test_few_rows_forward_are_inference_unless_their_tenant_trains() -> None:
    stages = Stages(16)
    assert stages.of(ALICE, ask("forward", 2), 0.0) == "inference"  # no earlier request
    assert stages.of(ALICE, ask("backward", 2), 1.0) == "fine_tuning"
    assert stages.of(ALICE, ask("forward", 2), 2.0) == "fine_tuning"
    assert stages.of(BOB, ask("forward", 2), 2.0) == "inference"
    assert stages.of(BOB, ask("forward", 17), 2.0) == "fine_tuning"
    assert stages.of(BOB, ask("forward", 16), 3.0) == "inference"


@pytest.mark.parametrize(("later", "stage"), [(59.0, "fine_tuning"), (61.0, "inference")])
def test_a_tenant_that_has_stopped_training_counts_as_inference_again(later: float, stage: str) -> None:
    stages = Stages(16)
    stages.of(ALICE, ask("backward", 2), 0.0)
    assert stages.of(ALICE, ask("forward", 1), later) == stage
