"""Attacks on noise that masks several rows: candidates, repeats and differences."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD
from threat_model.attacks.base import RECOVERED, DirectedAttack, GuessedRows, Outcome, RowsAttack, score_rows
from threat_model.attacks.exchanges import Subtraction, noises, stack, subtract_candidates, unstack
from threat_model.evidence.public import Public
from threat_model.evidence.truth import Truth
from threat_model.evidence.views import ExecutorView

_MAX_NOISES, _MAX_ROWS, _SAME = 64, 2000, 1e-3
_PAIRS, _SMALL = 3000, 1 << 27


class CandidateSubtraction(DirectedAttack[ExecutorView, Subtraction]):
    """Subtracts the noise that leaves the likeliest remainder. Without known noise, it uses the received row. An
    executor that has computed the effects of the noise knows the noise. The paper (Symbiosis §3.8) counts `pool ^
    layers` combinations. But each layer is solved separately: the cost is `rows x pool`, summed over layers."""

    name = "candidate subtraction"
    decisive = True
    sees = "rows, and noises whose effect it was asked for"
    source = "against Symbiosis §3.8"
    metric = RowsAttack.metric
    chance = RowsAttack.chance

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Subtraction:
        return subtract_candidates(view)

    def score(self, guess: Subtraction, truth: Truth) -> Outcome:
        outcome = score_rows(guess.rows, truth.of(direction=self.direction))
        combinations = sum(math.log10(k) for k in guess.pools)
        counts = {"distances tried": guess.trials, "combinations, log10": combinations, "layers": len(guess.pools)}
        return replace(outcome, figures={**outcome.figures, **counts})


class RepeatedRows(DirectedAttack[ExecutorView, GuessedRows], RowsAttack[ExecutorView]):
    """Treats rows that arrive repeatedly as noise. Ignores the requests for effects. A gradient is exactly zero where
    no label is learned, and padding repeats one row. Under reused noise, both arrive as the same bytes several times. A
    repeated row is the noise (plus a known row), to be subtracted from other rows."""

    name = "zero and padding rows"
    sees = "rows, no noise"
    source = "threat model, paper-pool"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> GuessedRows:
        rows: dict[int, Tensor] = {}
        for group in sorted({e.group for e in view.of(direction=self.direction)}):
            if self.direction == FORWARD and group:
                continue  # in deeper layers, a padding row is not public
            _, online = noises(view, group, self.direction)
            known = torch.zeros(online[0].rows.shape[1], dtype=torch.float64)
            if self.direction == FORWARD:
                padding = public.vocabulary_rows[public.pad_token]
                if online[0].arithmetic == "ring":
                    padding = public.in_ring(group, self.direction, padding[None])[0][0]
                known = padding.double()
            x = stack(online)
            repeated = _repeated(x[:_MAX_ROWS])
            if len(repeated):
                noise = repeated - known
                x = x - noise[torch.cdist(x, noise).argmin(dim=1)]
            rows |= unstack(x, online)
        return rows


def _repeated(x: Tensor) -> Tensor:
    """The rows that are repeated most often, within the size of a gradient that is only nearly zero; `[k, d]`."""
    size = x.norm(dim=1)
    # a float64 matrix product: its rounding error is 1e-8 of a row's length, not 1e-3
    near = torch.cdist(x, x) <= _SAME * size.median()
    found: list[Tensor] = []
    most = 0
    counts = near.sum(dim=1)
    while len(found) < _MAX_NOISES:
        best = int(counts.argmax())
        most = most or int(counts[best])
        if counts[best] < 2 or counts[best] * 2 < most:
            break
        found.append(x[best])
        gone = near[best].nonzero()[:, 0]
        counts -= near[:, gone].sum(dim=1)
        near[:, gone] = False
        counts[gone] = 0
    return torch.stack(found) if found else x[:0]


@dataclass(frozen=True, eq=False)
class Differences:
    """Claims about one group: the row at place `a[n]` (request, row) minus the row at place `b[n]` is `value[n]`.
    Places are int64 `[n, 2]`, values float64 `[n, d]`."""

    a: Tensor
    b: Tensor
    value: Tensor


class Differencing(DirectedAttack[ExecutorView, list[Differences]]):
    """Claims differences for the pairs whose difference is too small for two masks: `x'_i - x'_j = x_i - x_j`. In the
    ring, the difference of rows under independent pads is uniform, so it is never small in every entry by chance. Under
    one pad, every entry is small. In floats, the difference under one noise row is as small as activations are."""

    name = "differencing"
    sees = "rows, no noise"
    source = "rule 3; two-time pad"
    metric = "claimed differences within 1 %"
    chance = "0: no pair of one-time masks is close"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> list[Differences]:
        claims: list[Differences] = []
        for group in sorted({e.group for e in view.of(direction=self.direction)}):
            _, online = noises(view, group, self.direction)
            orders, lengths = torch.tensor([(e.order, len(e.rows)) for e in online]).t()
            row = torch.cat([torch.arange(n) for n in lengths.tolist()])
            place = torch.stack([orders.repeat_interleave(lengths), row], dim=1)
            x = torch.cat([e.rows for e in online])
            if shift := view.unused_bits:
                x = x << shift
            i, j = torch.randint(len(x), (2, _PAIRS), generator=rng)
            gap = x[i] - x[j]  # int32 wraps, as the ring does
            if online[0].arithmetic == "ring":
                size, limit = gap.double().abs().amax(dim=1), float(_SMALL)
            else:  # the boundary between near and far pairs, if there are both: the widest gap in the sorted logarithms
                size = gap.double().norm(dim=1)
                ordered = size.clamp(min=1e-12).log().sort().values
                low, high = int(0.01 * len(ordered)), int(0.99 * len(ordered))
                widest, at = (ordered[low + 1 : high] - ordered[low : high - 1]).max(dim=0)
                limit = float(ordered[low + at].exp()) * 1.0001 if float(widest) > 0.05 else 0.0
            near = (size < limit) & (i != j)
            claims.append(Differences(place[i[near]], place[j[near]], gap[near].double() / (1 << shift)))
        return claims

    def score(self, guess: list[Differences], truth: Truth) -> Outcome:
        claimed = sum(len(claims.value) for claims in guess)
        if not claimed:  # no claim was made
            return Outcome(0, _PAIRS, 0.0, 1.0)
        right = 0
        for claims in guess:
            x, y = _rows(truth, claims.a), _rows(truth, claims.b)
            error = (claims.value - (x - y)).norm(dim=1)
            right += int((error <= RECOVERED * (x.norm(dim=1) + y.norm(dim=1))).sum())
        return Outcome(right, claimed, 0.0, 0.0 if right else 1.0)


def _rows(truth: Truth, places: Tensor) -> Tensor:
    """The true rows at places `[n, 2]` (request, row), all of one group; float64 `[n, d]`."""
    orders, request = places[:, 0].unique(return_inverse=True)
    calls = [truth.calls[order].rows for order in orders.tolist()]
    first = torch.tensor([0, *map(len, calls)]).cumsum(0)
    return torch.cat(calls)[first[request] + places[:, 1]].double() if calls else torch.zeros((0, 1))
