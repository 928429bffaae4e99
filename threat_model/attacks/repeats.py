"""Zero rows and padding rows reveal reused noise.

A gradient is exactly zero where no label is learned, and padding repeats one row. Under reused noise, both arrive as
the same bytes several times. A repeated row is the noise (plus a known row), and can be subtracted from all other rows.
"""

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD
from threat_model.attacks.base import DirectedAttack, Rows, RowsAttack
from threat_model.attacks.reading import deal, noises, stack
from threat_model.evidence.public import Public
from threat_model.evidence.views import Exchange, ExecutorView

_MAX_NOISES, _MAX_ROWS, _SAME = 64, 2000, 1e-3


class RepeatedRows(DirectedAttack[ExecutorView, Rows], RowsAttack[ExecutorView]):
    """Treats rows that arrive repeatedly as noise. Ignores the requests for effects."""

    name = "zero and padding rows"
    family = "noise removal"
    party = "executor"
    sees = "rows, no noise"
    source = "threat model, paper-pool"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Rows:
        rows: dict[int, Tensor] = {}
        for group in sorted({e.group for e in view.of(direction=self.direction)}):
            if self.direction == FORWARD and group:
                continue  # in deeper layers, a padding row is not public
            _, online = noises(view, group, self.direction)
            known = torch.zeros(online[0].rows.shape[1], dtype=torch.float64)
            if self.direction == FORWARD:
                known = _as_sent(public, online[0], public.vocabulary_rows[public.pad_token])
            rows |= deal(_without_repeats(stack(online), known), online)
        return rows


def _as_sent(public: Public, exchange: Exchange, row: Tensor) -> Tensor:
    if exchange.arithmetic != "ring":
        return row.double()
    return public.in_ring(exchange.group, exchange.direction, row[None])[0][0].double()


def _without_repeats(x: Tensor, known: Tensor) -> Tensor:
    repeated = _repeated(x[:_MAX_ROWS])
    if not len(repeated):
        return x
    noise = repeated - known
    return x - noise[torch.cdist(x, noise).argmin(dim=1)]


def _repeated(x: Tensor) -> Tensor:
    """The rows that are repeated most often, within the size of a gradient that is only nearly zero; `[k, d]`."""
    size = x.norm(dim=1)
    # a float64 matrix product: its rounding error is 1e-8 of a row's length, not 1e-3
    near = torch.cdist(x, x) <= _SAME * size.median()
    found: list[Tensor] = []
    most = 0
    while len(found) < _MAX_NOISES:
        counts = near.sum(dim=1)
        best = int(counts.argmax())
        most = most or int(counts[best])
        if counts[best] < 2 or counts[best] * 2 < most:
            break
        found.append(x[best])
        gone = near[best].clone()
        near[gone] = False
        near[:, gone] = False
    return torch.stack(found) if found else x[:0]
