"""A row's scale identifies its token: the largest entry of a first-layer row is as good as a name (rule 5).

Quantisation needs one float per row. Sent along in clear, it is looked up in a table of the whole vocabulary.
"""

from __future__ import annotations

import torch

from symbiosis_priv.ring import FORWARD
from threat_model.attacks.base import Attack, Labels, Outcome, score_labels
from threat_model.attacks.tokens import FIRST, first_layer_tokens
from threat_model.public import Public
from threat_model.truth import Truth
from threat_model.views import ExecutorView


class RowScale(Attack[ExecutorView, Labels]):
    """Any header field with one number per row, against the scales that tokens have."""

    name = "row scale in clear"
    family = "protocol"
    party = "executor"
    sees = "header fields of the first layer group"
    source = "DESIGN §6"
    metric = "tokens"
    chance = "guesses dealt to random rows"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels | None:
        _, scales = public.in_ring(FIRST, FORWARD, public.vocabulary_rows)
        table = scales[:, 0].log()
        said = {}
        for exchange in view.of(group=FIRST, direction=FORWARD):
            for value in exchange.fields.values():
                if isinstance(value, list | tuple) and len(value) == len(exchange.rows):
                    sent = torch.tensor(value, dtype=torch.float64).log()
                    said[exchange.order] = (sent[:, None] - table).abs().argmin(dim=1)
        return said or None

    def score(self, guess: Labels, truth: Truth) -> Outcome:
        return score_labels(guess, first_layer_tokens(truth))
