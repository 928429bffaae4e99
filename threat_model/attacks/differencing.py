"""Differencing: two rows under one mask give away their difference, `x'_i - x'_j = x_i - x_j`.

In the ring a difference of independent pads is uniform, so that every entry is small once in a universe; under one
pad every entry is small always. In floats the difference of two rows under one noise is as small as activations are.
The attack looks for such pairs, and hands out their differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symbiosis_priv.ring import Direction
from threat_model.attacks.base import RECOVERED, Attack, Outcome
from threat_model.attacks.reading import noises
from threat_model.public import Public
from threat_model.truth import Truth
from threat_model.views import ExecutorView

_PAIRS, _SMALL = 3000, 1 << 27


@dataclass(frozen=True, eq=False)
class Difference:
    """A claim: row `i` of request `a` minus row `j` of request `b` is `value` `[d]`."""

    a: tuple[int, int]
    b: tuple[int, int]
    value: Tensor


class Differencing(Attack[ExecutorView, list[Difference]]):
    """Claims differences for the pairs whose difference is too small for two masks."""

    family = "noise removal"
    party = "executor"
    sees = "rows, no noise"
    source = "DESIGN §6; two-time pad"
    metric = "claimed differences within 1 %"
    chance = "0: no pair of one-time masks is close"

    def __init__(self, direction: Direction) -> None:
        self.direction = direction
        self.name = f"differencing, {direction}"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> list[Difference]:
        claims: list[Difference] = []
        for group in sorted({e.group for e in view.of(direction=self.direction)}):
            _, online = noises(view, group, self.direction)
            place = [(e.order, i) for e in online for i in range(len(e.rows))]
            x = torch.cat([e.rows for e in online])
            i, j = torch.randint(len(x), (2, _PAIRS), generator=rng)
            gap = x[i] - x[j]  # int32 wraps, as the ring does
            size = gap.double().abs().amax(dim=1) if online[0].arithmetic == "ring" else gap.double().norm(dim=1)
            limit = float(_SMALL) if online[0].arithmetic == "ring" else _valley(size)
            for k in ((size < limit) & (i != j)).nonzero()[:, 0].tolist():
                claims.append(Difference(place[int(i[k])], place[int(j[k])], gap[k].double()))
        return claims

    def score(self, guess: list[Difference], truth: Truth) -> Outcome:
        if not guess:  # nothing claimed, nothing learned
            return Outcome(0, _PAIRS, 0.0, 1.0, {"pairs claimed": 0})
        right = 0
        for claim in guess:
            x, y = (truth.calls[order].rows[row].double() for order, row in (claim.a, claim.b))
            right += float((claim.value - (x - y)).norm()) <= RECOVERED * float(x.norm() + y.norm())
        return Outcome(right, len(guess), 0.0, 0.0 if right else 1.0, {"pairs claimed": len(guess)})


def _valley(size: Tensor) -> float:
    """Between near pairs and far pairs, if there are two kinds: the widest gap in the sorted logarithms."""
    ordered = size.clamp(min=1e-12).log().sort().values
    low, high = int(0.01 * len(ordered)), int(0.99 * len(ordered))
    gaps = ordered[low + 1 : high] - ordered[low : high - 1]
    at = int(gaps.argmax())
    return float(ordered[low + at].exp()) * 1.0001 if float(gaps[at]) > 0.05 else 0.0
