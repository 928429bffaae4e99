"""Low-rank noise can be projected away.

K noise rows, and all their combinations, span K of d dimensions. If they are large, the first K principal axes of the
received rows are that span. Rows keep d - K coordinates outside the span, which are matched with the vocabulary.
"""

import torch
from torch.nn.functional import normalize

from symbiosis_priv.arithmetic.ring import FORWARD
from threat_model.attacks.base import Labels
from threat_model.attacks.first_layer import FIRST, FirstLayerAttack
from threat_model.attacks.reading import deal, noises, stack
from threat_model.evidence.public import Public
from threat_model.evidence.views import ExecutorView


class SubspaceProjection(FirstLayerAttack):
    """PCA; the rank is where the spectrum falls most steeply."""

    name = "subspace projection (PCA)"
    family = "noise removal"
    sees = "rows of the first layer group, no noise"
    source = "threat model, paper-pool"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels:
        _, online = noises(view, FIRST, FORWARD)
        x = stack(online)
        axes = torch.linalg.eigh(x.t() @ x / len(x))
        values, vectors = axes.eigenvalues.flip(0).clamp(min=1e-300), axes.eigenvectors.flip(1)
        most = 3 * x.shape[1] // 4
        rank = 1 + int((values[:most] / values[1 : most + 1]).argmax())
        table = public.vocabulary_rows.double()
        best: tuple[float, torch.Tensor] | None = None
        for cut in {0, rank}:  # rank 0: there is nothing to project away
            rest = vectors[:, cut:]
            fit = normalize(x @ rest, dim=1) @ normalize(table @ rest, dim=1).t()
            sure = float(fit.amax(dim=1).mean())
            if best is None or sure > best[0]:
                best = sure, fit.argmax(dim=1)
        assert best is not None
        return deal(best[1], online)
