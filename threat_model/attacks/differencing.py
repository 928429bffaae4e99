"""Differencing: two rows under one mask reveal their difference, `x'_i - x'_j = x_i - x_j`.

In the ring, the difference of rows under independent pads is uniform, so it is never small in every entry by chance.
Under one pad, every entry is small. In floats, the difference of two rows under one noise row is as small as
activations are. The attack finds such pairs and reports their differences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from threat_model.attacks.base import RECOVERED, DirectedAttack, Outcome
from threat_model.attacks.reading import noises
from threat_model.evidence.public import Public
from threat_model.evidence.truth import Truth
from threat_model.evidence.views import ExecutorView

_PAIRS, _SMALL = 3000, 1 << 27


@dataclass(frozen=True, eq=False)
class Differences:
    """Claims about one group: the row at place `a[n]` (request, row) minus the row at place `b[n]` is `value[n]`.

    Args:
        a, b: int64 `[n, 2]`.
        value: float64 `[n, d]`.
    """

    a: Tensor
    b: Tensor
    value: Tensor


class Differencing(DirectedAttack[ExecutorView, list[Differences]]):
    """Claims differences for the pairs whose difference is too small for two masks."""

    name = "differencing"
    family = "noise removal"
    party = "executor"
    sees = "rows, no noise"
    source = "rule 3; two-time pad"
    metric = "claimed differences within 1 %"
    chance = "0: no pair of one-time masks is close"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> list[Differences]:
        claims: list[Differences] = []
        for group in sorted({e.group for e in view.of(direction=self.direction)}):
            _, online = noises(view, group, self.direction)
            place = torch.tensor([(e.order, i) for e in online for i in range(len(e.rows))])
            x = torch.cat([e.rows for e in online])
            if shift := view.unused_bits:
                x = x << shift
            i, j = torch.randint(len(x), (2, _PAIRS), generator=rng)
            gap = x[i] - x[j]  # int32 wraps, as the ring does
            size = gap.double().abs().amax(dim=1) if online[0].arithmetic == "ring" else gap.double().norm(dim=1)
            limit = float(_SMALL) if online[0].arithmetic == "ring" else _valley(size)
            near = (size < limit) & (i != j)
            claims.append(Differences(place[i[near]], place[j[near]], gap[near].double() / (1 << shift)))
        return claims

    def score(self, guess: list[Differences], truth: Truth) -> Outcome:
        claimed = sum(len(claims.value) for claims in guess)
        if not claimed:  # no claim was made
            return Outcome(0, _PAIRS, 0.0, 1.0, {"pairs claimed": 0})
        right = 0
        for claims in guess:
            x, y = _rows(truth, claims.a), _rows(truth, claims.b)
            error = (claims.value - (x - y)).norm(dim=1)
            right += int((error <= RECOVERED * (x.norm(dim=1) + y.norm(dim=1))).sum())
        return Outcome(right, claimed, 0.0, 0.0 if right else 1.0, {"pairs claimed": claimed})


def _rows(truth: Truth, places: Tensor) -> Tensor:
    """The true rows at places `[n, 2]` (request, row), all of one group; float64 `[n, d]`."""
    orders, request = places[:, 0].unique(return_inverse=True)
    calls = [truth.calls[order].rows for order in orders.tolist()]
    first = torch.tensor([0, *map(len, calls)]).cumsum(0)
    return torch.cat(calls)[first[request] + places[:, 1]].double() if calls else torch.zeros((0, 1))


def _valley(size: Tensor) -> float:
    """The boundary between near pairs and far pairs, if there are both: the widest gap in the sorted logarithms."""
    ordered = size.clamp(min=1e-12).log().sort().values
    low, high = int(0.01 * len(ordered)), int(0.99 * len(ordered))
    gaps = ordered[low + 1 : high] - ordered[low : high - 1]
    at = int(gaps.argmax())
    return float(ordered[low + at].exp()) * 1.0001 if float(gaps[at]) > 0.05 else 0.0
