"""Each planted fault is found by its attack. Without the fault the attack finds nothing.

Most faults and attacks are those of the quick report.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

from symbiosis_priv.arithmetic.keystream import SEED_BYTES
from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD
from symbiosis_priv.errors import RoleConflictError
from tenant.core.pads import SessionSecret
from tests.cases import cases
from threat_model.attacks import Outcome
from threat_model.attacks.collusion import Collusion
from threat_model.attacks.tokens import Averaging, EvenMasks
from threat_model.evidence.public import alone
from threat_model.evidence.schemes import PAD, PADS, paper_pool
from threat_model.evidence.views import CollusionView
from threat_model.lab import PLANTED, Lab
from threat_model.planted import score, unfused_view
from threat_model.suite import Suite, examine

if TYPE_CHECKING:
    from tests.threat_model.conftest import Recorded

SMALL = PLANTED


def planted(quick: Suite, fault: str) -> Outcome:
    return next(trial.outcome for trial in quick.trials("Planted faults") if trial.labels[0] == fault)


@cases(__file__, "faults")
def test_the_named_attack_finds_the_fault(quick: Suite, name: str, least: float) -> None:
    outcome = planted(quick, name)
    assert outcome.success >= least
    assert outcome.broken


def test_three_maskings_reveal_more_than_one(lab: Lab, recorded: Recorded) -> None:
    recording = recorded(paper_pool(2, 256.0), SMALL)
    view, siblings = unfused_view(recording, lab.public)
    assert lab.public.siblings == alone(len(lab.public.manifest.groups))
    once = score(Averaging(), view, lab.public, recording).success
    assert score(Averaging(), view, siblings, recording).success > once + 0.1


def test_two_helpers_with_one_key_are_found_in_a_real_session(lab: Lab, recorded: Recorded) -> None:
    with mock.patch.object(SessionSecret, "seed_for", return_value=secrets.token_bytes(SEED_BYTES)):
        recording = lab.record(PADS, SMALL)
    outcome = score(EvenMasks(), recording.views.executor, lab.public, recording)
    assert outcome.success >= 0.99
    assert outcome.broken
    sound = examine(EvenMasks(), recorded(PADS, replace(SMALL, game_rows=2048)), lab).outcome
    assert sound is not None
    assert not sound.broken


def test_a_helper_of_the_executors_company_is_refused_by_a_sound_tenant(lab: Lab) -> None:
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
