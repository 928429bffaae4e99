"""Averaging: a row that is masked several times, each time with fresh noise, shines through the mean.

Noise of M maskings shrinks by sqrt(M), the row does not. q, k and v read the same row: sent on their own with a noise
each, M = 3. A tenant that fuses siblings sends it once (rule 4).
"""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from symbiosis_priv.arithmetic.ring import FORWARD
from threat_model.attacks.base import Labels
from threat_model.attacks.first_layer import FIRST, FirstLayerAttack
from threat_model.attacks.reading import noises
from threat_model.evidence.public import Public
from threat_model.evidence.views import ExecutorView


class Averaging(FirstLayerAttack):
    """Mean over sibling requests, then a matched filter against the vocabulary; noises are never looked at."""

    name = "averaging siblings"
    family = "noise removal"
    sees = "rows of every group that reads the embedding, no noise"
    source = "rule 4"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels:
        siblings = next(group for group in public.siblings if FIRST in group)
        table = public.vocabulary_rows.double()
        streams = [noises(view, group, FORWARD)[1] for group in siblings]
        said = {}
        for same in zip(*streams, strict=True):
            mean = torch.stack([e.rows.double() for e in same]).mean(dim=0)
            # the likeliest row under isotropic noise; a ring row's scale is unknown, so there it is the best cosine
            bias = torch.zeros(()) if same[0].arithmetic == "ring" else table.square().sum(dim=1) / 2
            filters = normalize(table, dim=1) if same[0].arithmetic == "ring" else table
            said[same[0].order] = (mean @ filters.t() - bias).argmax(dim=1)
        return said
