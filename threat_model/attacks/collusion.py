"""Executor and helper together: expand the seed, take the pad off. This must succeed: `pad` rests on their not doing
it.

Which pad row lies under which masked row is not even a question: the right one leaves small integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from symbiosis_priv.keystream import expand, mask_key
from symbiosis_priv.ring import FORWARD, Direction
from threat_model.attacks.base import Attack, Outcome, Rows, score_rows
from threat_model.public import Public
from threat_model.truth import Truth
from threat_model.views import CollusionView, HelperView

_SMALL, _COLUMNS = 1 << 27, 4


class Collusion(Attack[CollusionView, Rows]):
    """Every pad row that any seed and request implies, tried on every masked row."""

    family = "collusion"
    party = "executor+helper"
    sees = "masked rows, seeds and row ranges"
    source = "DESIGN §3, rule 8"
    metric = "rows within 1 %"
    chance = "0; the verdict uses a line-up with chance 1/2"

    def __init__(self, direction: Direction) -> None:
        self.direction = direction
        self.name = f"collusion, {direction}"

    def run(self, view: CollusionView, public: Public, rng: torch.Generator) -> Rows | None:
        rows: dict[int, Tensor] = {}
        for group in sorted({e.group for e in view.executor.of(direction=self.direction)}):
            pads = pad_rows(view.helper, public, group, self.direction)
            if not len(pads):
                continue
            for exchange in view.executor.of(group=group, direction=self.direction):
                rows[exchange.order] = _taken_off(exchange.rows, pads)
        return rows or None

    def score(self, guess: Rows, truth: Truth) -> Outcome:
        calls = {o: c for o, c in truth.of(direction=self.direction) if o in guess}
        return score_rows(guess, calls, torch.Generator().manual_seed(1))


def pad_rows(view: HelperView, public: Public, group: int, direction: Direction) -> Tensor:
    """Every pad row that the helper was asked about, int32 `[n, d]`."""
    entry = public.manifest.groups[group]
    width = entry.inputs if direction == FORWARD else entry.width
    parts = [
        expand(mask_key(e.seed, group=entry.name, direction=direction), first_row=e.first_row, rows=e.rows, width=width)
        for e in view.effects
        if (e.group, e.direction) == (group, direction)
    ]
    return torch.cat(parts) if parts else torch.empty((0, width), dtype=torch.int32)


def _taken_off(rows: Tensor, pads: Tensor) -> Tensor:
    """Rows minus their pads, float64; a few columns decide which pad fits."""
    left = torch.stack([(rows[:, None, c] - pads[None, :, c]).abs().long() for c in range(_COLUMNS)]).amax(dim=0)
    # -2^31 has no positive twin: abs leaves it negative, and it must not win
    best = torch.where(left < 0, 1 << 40, left).argmin(dim=1)
    return (rows - pads[best]).double()
