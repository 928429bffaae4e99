"""Candidate subtraction: the executor has computed the effects of the noise, so it knows the noise.

The paper (Symbiosis §3.8) counts `pool ^ layers` combinations. An attacker does not have to guess a combination,
because each layer is solved separately. The cost is `rows x pool` distances, summed over layers.
"""

import math
from dataclasses import replace

import torch

from threat_model.attacks.base import DirectedAttack, Outcome, RowsAttack, score_rows
from threat_model.attacks.reading import Subtraction, subtract_candidates
from threat_model.evidence.public import Public
from threat_model.evidence.truth import Truth
from threat_model.evidence.views import ExecutorView


class CandidateSubtraction(DirectedAttack[ExecutorView, Subtraction]):
    """Subtracts the noise that leaves the likeliest remainder. Without known noise, it uses the received row."""

    name = "candidate subtraction"
    family = "noise removal"
    party = "executor"
    decisive = True
    sees = "rows, and noises whose effect it was asked for"
    source = "against Symbiosis §3.8"
    metric = RowsAttack.metric
    chance = RowsAttack.chance

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Subtraction:
        return subtract_candidates(view)

    def score(self, guess: Subtraction, truth: Truth) -> Outcome:
        outcome = score_rows(guess.rows, dict(truth.of(direction=self.direction)))
        combinations = sum(math.log10(k) for k in guess.pools)
        counts = {"distances tried": guess.trials, "combinations, log10": combinations, "layers": len(guess.pools)}
        return replace(outcome, figures={**outcome.figures, **counts})
