"""Each planted fault is found by its attack. Without the fault the attack finds nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction
from symbiosis_priv.errors import RoleConflictError
from threat_model.attacks import Attack
from threat_model.attacks.averaging import Averaging
from threat_model.attacks.collusion import Collusion
from threat_model.attacks.differencing import Differencing
from threat_model.attacks.parity import EvenMasks
from threat_model.attacks.row_scale import RowScale
from threat_model.attacks.sampler_grid import SamplerGrid
from threat_model.attacks.seeds import SeedRecovery
from threat_model.evidence.public import Public, alone
from threat_model.evidence.schemes import LOCAL, NONE, PAD, PAD_RELAY, PADS, paper_pool
from threat_model.evidence.views import CollusionView, ExecutorView
from threat_model.lab import Lab, Recording, Workload
from threat_model.planted import (
    Fault,
    bare_effect_faults,
    bare_effects,
    blind_to_companies,
    one_company_faults,
    plant,
    reused_pad_faults,
    reused_pads,
    twin_helper_fault,
    twin_helpers,
)
from threat_model.suite import Verdict, examine

if TYPE_CHECKING:
    from tests.threat_model.conftest import Recorded

SMALL = Workload(steps=4, generations=2, prompts=16, new_tokens=3, game_rows=512)


@pytest.fixture(scope="module")
def faults(lab: Lab, recorded: Recorded) -> dict[str, Fault]:
    planted = plant(recorded(NONE, SMALL), recorded(paper_pool(2, 1.0), SMALL), lab.public)
    return {fault.name: fault for fault in planted}


@pytest.fixture(scope="module", params=[PAD, PAD_RELAY, LOCAL], ids=lambda scheme: scheme.name)
def sound(recorded: Recorded, request: pytest.FixtureRequest) -> Recording:
    return recorded(request.param, SMALL)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("ring masks from torch.randint", 0.99),
        ("float masks from torch.randn", 0.95),
        ("one-time masks in float32", 0.9),
        ("unfused q/k/v, separate float noise", 0.4),
        ("noises of low rank", 0.8),
        ("scale on the wire", 0.99),
    ],
)
def test_the_named_attack_finds_the_fault(faults: dict[str, Fault], name: str, least: float) -> None:
    outcome = faults[name].outcome()
    assert outcome.success >= least
    assert outcome.broken


@pytest.mark.parametrize("attack", [SeedRecovery(), SamplerGrid(), RowScale(), Averaging()], ids=lambda a: a.name)
def test_without_the_fault_the_attack_finds_nothing(lab: Lab, sound: Recording, attack: Attack[Any, Any]) -> None:
    outcome = examine(attack, sound, lab).outcome
    assert outcome is None or not outcome.broken


def test_bare_effects_are_found(lab: Lab, recorded: Recorded) -> None:
    """And with the second keystream, what the executor computes from blocks shows nothing."""
    with bare_effects():
        recording = lab.record(PAD_RELAY, SMALL)
    for fault in bare_effect_faults(recording, lab.public):
        outcome = fault.outcome()
        assert outcome.broken
        assert outcome.success > 0.2  # products with fewer outputs than inputs leave rows open
        sound = examine(fault.attack, recorded(PAD_RELAY, SMALL), lab)
        assert sound.verdict is Verdict.HIDDEN


def test_three_maskings_reveal_more_than_one(faults: dict[str, Fault], lab: Lab) -> None:
    fault = faults["unfused q/k/v, separate float noise"]
    coins = torch.Generator().manual_seed(0)
    assert isinstance(fault.view, ExecutorView)
    once = Averaging().run(fault.view, _fused(lab), coins)
    single = Averaging().score(once, fault.recording.truth).success
    assert fault.outcome().success > single + 0.1


def _fused(lab: Lab) -> Public:
    assert lab.public.siblings == alone(len(lab.public.manifest.groups))
    return lab.public


def test_reused_pad_rows_are_found_in_a_real_session(lab: Lab) -> None:
    with reused_pads():
        recording = lab.record(PAD, SMALL)
    for fault in reused_pad_faults(recording, lab.public):
        outcome = fault.outcome()
        assert outcome.success == 1.0
        assert outcome.figures["pairs claimed"] > 10
        assert outcome.broken


def test_two_helpers_with_one_key_are_found_in_a_real_session(lab: Lab, recorded: Recorded) -> None:
    with twin_helpers():
        recording = lab.record(PADS, SMALL)
    outcome = twin_helper_fault(recording, lab.public).outcome()
    assert outcome.success >= 0.99
    assert outcome.broken
    sound = examine(EvenMasks(), recorded(PADS, replace(SMALL, game_rows=2048)), lab).outcome
    assert sound is not None
    assert not sound.broken


def test_a_helper_of_the_executors_company_is_found_in_a_real_session_and_refused_in_a_sound_one(lab: Lab) -> None:
    with blind_to_companies():
        recording = lab.record(PAD, SMALL, federation=lab.one_company)
    for fault in one_company_faults(recording, lab.public):
        outcome = fault.outcome()
        assert outcome.success == 1.0
        assert outcome.broken
    with pytest.raises(RoleConflictError, match="executor 'executor' has helpers of 0 companies other than its own"):
        lab.record(PAD, SMALL, federation=lab.one_company)


def test_a_sound_tenant_uses_the_other_helper_and_the_company_reads_nothing(lab: Lab) -> None:
    """Two helpers, one of them of the executor's company, and one helper per pad: that helper gets no request."""
    both = lab.folder / "federation-2.toml"
    chosen = lab.folder / "federation-spare.toml"
    company = lab.one_company.read_text().removeprefix(lab.federation_path.read_text())
    assert "[[company]]" in company
    chosen.write_text(both.read_text() + company)
    recording = lab.record(PADS, SMALL, federation=chosen)
    assert {effect.helper for helper in recording.views.helpers for effect in helper.effects} == {"second-helper"}
    for attack in (Collusion(FORWARD), Collusion(BACKWARD)):
        alone = CollusionView(recording.views.executor, ())
        assert attack.run(alone, lab.public, torch.Generator()) is None
        everybody = CollusionView(recording.views.executor, recording.views.helpers)
        guess = attack.run(everybody, lab.public, torch.Generator())
        assert guess is not None
        assert attack.score(guess, recording.truth).success == 1.0  # the pads are the other helper's


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_one_time_pads_leave_no_close_pair(lab: Lab, sound: Recording, direction: Direction) -> None:
    outcome = examine(Differencing(direction), sound, lab).outcome
    assert outcome is not None
    assert outcome.figures["pairs claimed"] == 0  # chance of one: pairs * 2^-4d
