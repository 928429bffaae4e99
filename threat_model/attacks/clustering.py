"""Blind clustering: an attacker that does not know the noise, for example with a stolen log, finds it in the rows.

Rows under one noise row lie close to it. K-means finds the clusters. Then the public vocabulary makes the result exact,
by alternating

    token_i = argmin_v |x'_i - n_k(i) - e_v|        n_k = mean over its rows of (x'_i - e_token(i)),

which is the EM algorithm for a mixture whose components have a known shape and an unknown shift.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from symbiosis_priv.arithmetic.ring import FORWARD
from threat_model.attacks.base import Labels
from threat_model.attacks.exchanges import first_rows, noises, stack, unstack
from threat_model.attacks.first_layer import FIRST, FirstLayerAttack
from threat_model.evidence.public import Public
from threat_model.evidence.views import ExecutorView

_MAX_CLUSTERS, _MAX_ROWS, _ROUNDS, _EM_ROUNDS = 16, 1500, 15, 12


class BlindClustering(FirstLayerAttack):
    """K-means, then expectation-maximisation against the vocabulary, in the first layer."""

    name = "blind clustering"
    family = "noise removal"
    sees = "rows of the first layer group, no noise"
    source = "threat model, paper-pool"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels:
        _, online = noises(view, FIRST, FORWARD)
        online = first_rows(online, _MAX_ROWS)
        x = stack(online)
        table = public.vocabulary_rows.double()
        # each row has an unknown scale: scale it to the mean length of the table's rows
        if online[0].arithmetic == "ring":
            x = normalize(x, dim=1) * table.norm(dim=1).mean()
        usual = table[public.corpus].mean(dim=0)
        best: tuple[float, Tensor] | None = None
        for count in (1, 2, 4, _MAX_CLUSTERS):
            centres = _k_means(x, count, rng)
            guessed, cost = _fit(x, centres - usual, table)
            if best is None or cost < best[0]:
                best = cost, guessed
        assert best is not None
        return unstack(best[1], online)


def _k_means(x: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Return centres `[count, d]`. Initial centres are far apart (k-means++)."""
    centres = x[torch.randint(len(x), (1,), generator=rng)]
    while len(centres) < count:
        distance = torch.cdist(x, centres).amin(dim=1).square() + 1e-12
        centres = torch.cat([centres, x[torch.multinomial(distance, 1, generator=rng)]])
    for _ in range(_ROUNDS):
        pick = torch.cdist(x, centres).argmin(dim=1)
        for k in range(count):
            if bool((pick == k).any()):
                centres[k] = x[pick == k].mean(dim=0)
    return centres


def _fit(x: Tensor, noise: Tensor, table: Tensor) -> tuple[Tensor, float]:
    """Return tokens `[n]`, and the mean squared distance."""
    guessed, cost = torch.full((len(x),), -1), float("inf")
    known = table.square().sum(dim=1) - 2 * x @ table.t()
    for _ in range(_EM_ROUNDS):
        # |x - n - e|^2 = |x - n|^2 + |e|^2 + 2 ne - 2 xe: the largest term is the same in every round
        near = [(known + 2 * (table @ n)).min(dim=1) for n in noise]
        apart = torch.cdist(x, noise).square().t()
        left, pick = (apart + torch.stack([n.values for n in near])).min(dim=0)
        before, guessed = guessed, torch.stack([n.indices for n in near]).gather(0, pick[None])[0]
        cost = float(left.mean())
        if torch.equal(before, guessed):
            break
        for k in range(len(noise)):
            if bool((pick == k).any()):
                noise[k] = (x - table[guessed])[pick == k].mean(dim=0)
    return guessed, cost
