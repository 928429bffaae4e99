"""Base of attacks that read tokens from the first layer group: its rows come from a public table."""

from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD
from threat_model.attacks.base import Labels, LabelsAttack, Outcome, score_labels
from threat_model.evidence.truth import Truth
from threat_model.evidence.views import ExecutorView

FIRST = 0
"""The first layer group."""


def first_layer_tokens(truth: Truth) -> dict[int, Tensor]:
    """The token of each row of the first group, by request: int64 `[n]`."""
    return {o: c.tokens for o, c in truth.of(group=FIRST, direction=FORWARD) if c.tokens is not None}


class FirstLayerAttack(LabelsAttack[ExecutorView]):
    """Guesses a token for each row of the first group, or of some requests for it."""

    def score(self, guess: Labels, truth: Truth) -> Outcome:
        return score_labels(guess, first_layer_tokens(truth))
