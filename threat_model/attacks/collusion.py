"""A helper alone, and the executor and helpers together: they expand the seeds, and subtract the pads.

With all helpers the attack must succeed, because `pad` assumes that they do not all collude. With all helpers except
one it must fail, because one unknown share hides the sum. The attack need not know which pad row belongs to which
masked row: only the right one leaves small integers.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from symbiosis_priv.arithmetic.keystream import expand, mask_key
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from threat_model.attacks.base import Attack, DirectedAttack, GuessedRows, Outcome, RowsAttack, score_guesses
from threat_model.attacks.exchanges import unstack
from threat_model.attacks.statistics_of_masks import Distinguisher
from threat_model.attacks.tokens import FIRST, first_layer_tokens
from threat_model.evidence.public import Public
from threat_model.evidence.truth import Truth
from threat_model.evidence.views import CollusionView, ExecutorView, HelperView

_SMALL, _COLUMNS, _RING = 1 << 23, 4, 1 << 32


class _Collusion(DirectedAttack[CollusionView, GuessedRows], RowsAttack[CollusionView]):
    """Tries every pad row that follows from seeds and requests on every masked row."""

    def run(self, view: CollusionView, public: Public, rng: torch.Generator) -> GuessedRows | None:
        rows: dict[int, Tensor] = {}
        for group in sorted({e.group for e in view.executor.of(direction=self.direction)}):
            _, pads = pad_rows(view.helpers, public, group, self.direction)
            if not len(pads):
                continue
            exchanges = view.executor.of(index=group, direction=self.direction)
            shift = view.executor.unused_bits
            masked, pads = torch.cat([e.rows for e in exchanges]) << shift, pads << shift
            rows |= unstack((masked - pads[matching(masked, pads)] >> shift).double(), exchanges)
        return rows or None


class Collusion(_Collusion):
    name = "collusion"
    party = "executor+helper"
    decisive = True
    sees = "masked rows, every seed and row range"
    source = "rule 8"


class PartialCollusion(_Collusion):
    """Collusion of the executor and all helpers except one. The missing helper's seed hides the rows."""

    name = "one helper is honest"
    party = "all but a helper"
    sees = "masked rows, seeds and row ranges of all helpers but one"
    source = "threat model, pad"


class HelperAlone(Attack[HelperView, Tensor]):
    """Treats the pad rows that a helper expands as rows, and matches them with the vocabulary in order."""

    name = "helper's pads as rows"
    party = "helper"
    sees = "seeds, row ranges, effects"
    source = "threat model, pad"
    metric = "tokens"
    chance = "the same guesses at random rows"

    def run(self, view: HelperView, public: Public, rng: torch.Generator) -> Tensor | None:
        pads = pad_rows([view], public, FIRST, FORWARD)[1].double()
        if not len(pads):
            return None
        table = normalize(public.vocabulary_rows.double(), dim=1)
        return (normalize(pads, dim=1) @ table.t()).argmax(dim=1)

    def score(self, guess: Tensor, truth: Truth) -> Outcome:
        real = torch.cat(list(first_layer_tokens(truth).values()))
        n = min(len(real), len(guess))
        return score_guesses(guess[:n], real[:n])


class Coalition(DirectedAttack[CollusionView, Tensor]):
    """A two-row distinguisher for a coalition that knows all shares except one. It is also told which row of a share
    belongs to which request, which a real coalition does not know."""

    name = "distinguisher of a coalition"
    party = "all but a helper"
    sees = "rows of a game with two rows that it chose, less the shares of all helpers but one"
    source = "threat model, pad"
    metric = "rows told apart"
    chance = "1/2"

    def __init__(self, direction: Direction) -> None:
        super().__init__(direction)
        self._inner = Distinguisher(direction)

    def run(self, view: CollusionView, public: Public, rng: torch.Generator) -> Tensor | None:
        game = view.executor.games.get(self.direction)
        if game is None or not view.helpers:
            return None
        known, unknown, half = game.known, game.unknown, len(game.known)
        for helper in view.helpers:
            share = game.shares[helper.effects[0].helper]
            known, unknown = known - share[:half], unknown - share[half:]
        shift = view.executor.unused_bits
        known, unknown = known << shift >> shift, unknown << shift >> shift
        left = replace(game, known=known, unknown=unknown)
        return self._inner.run(ExecutorView((), {self.direction: left}), public, rng)

    def score(self, guess: Tensor, truth: Truth) -> Outcome:
        return self._inner.score(guess, truth)


def pad_rows(helpers: Sequence[HelperView], public: Public, index: int, direction: Direction) -> tuple[Tensor, Tensor]:
    """The rows of all pads whose effects the helpers were asked for, summed over the helpers. Returns row numbers,
    int64 `[n]`, and pad rows, int32 `[n, d]`."""
    entry = public.manifest.groups[index]
    width = entry.inputs if direction == FORWARD else entry.stacked_outputs
    pads: dict[tuple[int, int], Tensor] = {}  # all helpers are asked about the same rows
    for e in (e for helper in helpers for e in helper.effects):
        if (e.group, e.direction) == (index, direction):
            key = mask_key(e.seed, group_name=entry.name, direction=direction)
            share = expand(key, first_row=e.first_row, rows=e.rows, width=width)
            at = e.first_row, e.rows
            pads[at] = pads[at] + share if at in pads else share
    if not pads:
        return torch.empty(0, dtype=torch.int64), torch.empty((0, width), dtype=torch.int32)
    return torch.cat([torch.arange(first, first + rows) for first, rows in pads]), torch.cat(list(pads.values()))


def matching(rows: Tensor, pads: Tensor) -> Tensor:
    """Index of the pad of each row: int32 `[r, d]` and `[n, d]` to int64 `[r]`. The right pad leaves small integers:
    one column leaves few candidates, and a few more columns decide between them."""
    near = rows[:, 0].long()
    keys, which = torch.cat([pads[:, 0].long() + turn for turn in (-_RING, 0, _RING)]).sort()
    first, last = (torch.searchsorted(keys, near + step) for step in (-_SMALL, _SMALL))
    best, least = torch.zeros_like(near), torch.full_like(near, _RING)
    for step in range(int((last - first).max()) + 1):
        tried = which[(first + step).clamp(max=len(keys) - 1)] % len(pads)
        left = (rows[:, :_COLUMNS] - pads[tried, :_COLUMNS]).long().abs().amax(dim=1)
        best, least = torch.where(left < least, tried, best), torch.minimum(left, least)
    return best
