"""A row's scale identifies its token: the largest entry of a first-layer row is nearly unique (rule 5).

Quantisation needs one float per row. If a tenant sent it in clear, an attacker could look it up in a table of the whole
vocabulary.
"""

import torch

from symbiosis_priv.arithmetic.ring import FORWARD
from threat_model.attacks.base import Labels
from threat_model.attacks.first_layer import FIRST, FirstLayerAttack
from threat_model.evidence.public import Public
from threat_model.evidence.views import ExecutorView


class RowScale(FirstLayerAttack):
    """Compares any header field that has one number per row with the scales of tokens."""

    name = "row scale in clear"
    family = "protocol"
    sees = "header fields of the first layer group"
    source = "rule 5"

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
