"""Averaging: if a row is masked several times, each time with fresh noise, the mean approaches the row.

The noise in the mean of M maskings shrinks by sqrt(M); the row does not. q, k and v have the same input: if each is
sent separately with its own noise, M = 3. A tenant that fuses siblings sends the row once (rule 4).
"""

import torch
from torch.nn.functional import normalize

from symbiosis_priv.arithmetic.ring import FORWARD
from threat_model.attacks.base import Labels
from threat_model.attacks.first_layer import FIRST, FirstLayerAttack
from threat_model.attacks.reading import noises
from threat_model.evidence.public import Public
from threat_model.evidence.views import ExecutorView


class Averaging(FirstLayerAttack):
    """Takes the mean over sibling requests, then applies a matched filter against the vocabulary. Ignores known
    noise."""

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
            # the likeliest row under isotropic noise; the scale of a ring row is unknown, so the best cosine is used
            # there
            bias = torch.zeros(()) if same[0].arithmetic == "ring" else table.square().sum(dim=1) / 2
            filters = normalize(table, dim=1) if same[0].arithmetic == "ring" else table
            said[same[0].order] = (mean @ filters.t() - bias).argmax(dim=1)
        return said
