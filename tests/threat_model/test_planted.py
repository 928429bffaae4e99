"""Each planted fault is found by its attack. Without the fault the attack finds nothing.

Most faults and attacks are those of the quick report.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from symbiosis_priv.arithmetic.ring import BACKWARD, DIRECTIONS, FORWARD, Direction
from symbiosis_priv.errors import RoleConflictError
from threat_model.attacks import Attack, Outcome
from threat_model.attacks.collusion import Collusion
from threat_model.attacks.exchanges import RelayedAnswers
from threat_model.attacks.reused_noise import Differencing
from threat_model.attacks.statistics_of_masks import SamplerGrid, SeedRecovery
from threat_model.attacks.tokens import Averaging, EvenMasks, RowScale
from threat_model.evidence.public import alone
from threat_model.evidence.schemes import LOCAL, PAD, PAD_RELAY, PADS, AttackedScheme, paper_pool
from threat_model.evidence.views import CollusionView
from threat_model.lab import PLANTED, Lab
from threat_model.planted import score, twin_helpers, unfused_view
from threat_model.suite import Suite, Verdict, examine

if TYPE_CHECKING:
    from tests.threat_model.conftest import Recorded

SMALL = PLANTED
sound = pytest.mark.parametrize("scheme", [PAD, PAD_RELAY, LOCAL], ids=lambda scheme: scheme.name)


def planted(quick: Suite, fault: str) -> Outcome:
    return next(cell.outcome for cell in quick.planted if cell.fault == fault)


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
def test_the_named_attack_finds_the_fault(quick: Suite, name: str, least: float) -> None:
    outcome = planted(quick, name)
    assert outcome.success >= least
    assert outcome.broken


@sound
@pytest.mark.parametrize("attack", [SeedRecovery(), SamplerGrid(), RowScale(), Averaging()], ids=lambda a: a.name)
def test_without_the_fault_the_attack_finds_nothing(
    quick: Suite, scheme: AttackedScheme, attack: Attack[Any, Any]
) -> None:
    outcome = quick.cell(attack.name, scheme.name).outcome
    assert outcome is None or not outcome.broken


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bare_effects_are_found(quick: Suite, direction: Direction) -> None:
    """And with the second keystream, what the executor computes from blocks shows nothing."""
    outcome = planted(quick, f"relayed effects are bare, {direction}")
    assert outcome.broken
    assert outcome.success > 0.2  # products with fewer outputs than inputs leave rows open
    assert quick.cell(RelayedAnswers(direction).name, PAD_RELAY.name).verdict is Verdict.HIDDEN


def test_three_maskings_reveal_more_than_one(lab: Lab, recorded: Recorded) -> None:
    recording = recorded(paper_pool(2, 256.0), SMALL)
    view, siblings = unfused_view(recording, lab.public)
    assert lab.public.siblings == alone(len(lab.public.manifest.groups))
    once = score(Averaging(), view, lab.public, recording).success
    assert score(Averaging(), view, siblings, recording).success > once + 0.1


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_reused_pad_rows_are_found_in_a_real_session(quick: Suite, direction: Direction) -> None:
    outcome = planted(quick, f"reused pad rows, {direction}")
    assert outcome.success == 1.0
    assert outcome.figures["pairs claimed"] > 10
    assert outcome.broken


def test_two_helpers_with_one_key_are_found_in_a_real_session(lab: Lab, recorded: Recorded) -> None:
    with twin_helpers():
        recording = lab.record(PADS, SMALL)
    outcome = score(EvenMasks(), recording.views.executor, lab.public, recording)
    assert outcome.success >= 0.99
    assert outcome.broken
    sound = examine(EvenMasks(), recorded(PADS, replace(SMALL, game_rows=2048)), lab).outcome
    assert sound is not None
    assert not sound.broken


def test_a_helper_of_the_executors_company_is_found_in_a_real_session_and_refused_in_a_sound_one(
    quick: Suite, lab: Lab
) -> None:
    for direction in DIRECTIONS:
        outcome = planted(quick, f"executor and helper of one company, {direction}")
        assert outcome.success == 1.0
        assert outcome.broken
    with pytest.raises(RoleConflictError, match="executor 'executor' has helpers of 0 companies other than its own"):
        lab.record(PAD, SMALL, federation=lab.one_company)


def test_a_sound_tenant_uses_the_other_helper_and_the_company_reads_nothing(lab: Lab) -> None:
    """Two helpers, one of them of the executor's company, and one helper per pad: that helper gets no request."""
    company = {"Holding SE": ["executor", "helper"]}
    chosen = lab.write_federation("spare", 2, pads={"helpers": 1}, companies=company)
    recording = lab.record(PADS, SMALL, federation=chosen)
    assert {effect.helper for helper in recording.views.helpers for effect in helper.effects} == {"second-helper"}
    for attack in (Collusion(FORWARD), Collusion(BACKWARD)):
        by_itself = CollusionView(recording.views.executor, ())
        assert attack.run(by_itself, lab.public, torch.Generator()) is None
        everybody = CollusionView(recording.views.executor, recording.views.helpers)
        guess = attack.run(everybody, lab.public, torch.Generator())
        assert guess is not None
        assert attack.score(guess, recording.truth).success == 1.0  # the pads are the other helper's


@sound
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_time_pads_leave_no_close_pair(quick: Suite, scheme: AttackedScheme, direction: Direction) -> None:
    outcome = quick.cell(Differencing(direction).name, scheme.name).outcome
    assert outcome is not None
    assert outcome.figures["pairs claimed"] == 0  # chance of one: pairs * 2^-4d
