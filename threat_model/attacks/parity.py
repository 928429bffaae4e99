"""Even masks: the attack on two helpers that expand the same stream.

Two equal shares n add up to 2n, whose lowest bit is 0. So the lowest bit of every entry is the row's own bit. A row has
far more entries than a token has bits, and the rows of the first layer are public except for the choice of the token.
"""

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD
from threat_model.attacks.base import Labels
from threat_model.attacks.first_layer import FIRST, FirstLayerAttack
from threat_model.evidence.public import Public
from threat_model.evidence.views import ExecutorView


class EvenMasks(FirstLayerAttack):
    """Guesses the token whose integers agree with the row in the lowest bit of most entries."""

    name = "even masks"
    family = "text"
    sees = "the lowest bit of each entry, first layer group"
    source = "rule 11"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels | None:
        table = _signs(public.in_ring(FIRST, FORWARD, public.vocabulary_rows, ring_bits=view.ring_bits)[0])
        exchanges = [e for e in view.of(group=FIRST, direction=FORWARD) if e.arithmetic == "ring"]
        return {e.order: (_signs(e.rows) @ table.t()).argmax(dim=1) for e in exchanges} or None


def _signs(rows: Tensor) -> Tensor:
    """1 for even, -1 for odd, float32."""
    return 1.0 - 2.0 * (rows & 1)
