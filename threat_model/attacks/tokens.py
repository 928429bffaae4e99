"""From rows back to text: the embedding is public, so the rows of the first layer are a table look-up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import normalize

from symbiosis_priv.ring import FORWARD
from threat_model.attacks.base import Attack, Labels, Outcome, score_labels
from threat_model.attacks.reading import prefills, subtract_candidates
from threat_model.public import Public
from threat_model.truth import Truth
from threat_model.views import ExecutorView

FIRST = 0


def first_layer_tokens(truth: Truth) -> dict[int, Tensor]:
    """The token behind each row of the first group."""
    return {o: c.tokens for o, c in truth.of(group=FIRST, direction=FORWARD) if c.tokens is not None}


def nearest_tokens(rows: Mapping[int, Tensor], public: Public, orders: set[int]) -> dict[int, Tensor]:
    """The vocabulary row of largest cosine, which no secret scale can change."""
    table = normalize(public.vocabulary_rows.double(), dim=1)
    return {o: (normalize(r, dim=1) @ table.t()).argmax(dim=1) for o, r in rows.items() if o in orders}


class FirstLayerTokens(Attack[ExecutorView, Labels]):
    """Candidate subtraction, then `argmax_v cos(x, norm(embedding_v))`."""

    name = "tokens, first layer"
    family = "text"
    party = "executor"
    sees = "rows of the first layer group"
    source = "DESIGN §6"
    metric = "tokens"
    chance = "guesses dealt to random rows"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels:
        wanted = {e.order for e in view.of(group=FIRST, direction=FORWARD)}
        return nearest_tokens(subtract_candidates(view).rows, public, wanted)

    def score(self, guess: Labels, truth: Truth) -> Outcome:
        return score_labels(guess, first_layer_tokens(truth))


class DeepLayerTokens(Attack[ExecutorView, Labels]):
    """Without the first layer: run the public model on every next token, keep the one whose activation fits.

    Greedy along the sequence: position t is decided with positions before it fixed, so the cost is vocabulary x length
    forward passes and not vocabulary ^ length. The tenant's adapters are unknown; the nearest activation is still
    the right one.
    """

    name = "tokens, deep layer"
    family = "text"
    party = "executor"
    sees = "rows of the second block alone"
    source = "activation matching; DESIGN §6"
    metric = "tokens"
    chance = "guesses dealt to random rows"

    def __init__(self, *, sequences: int = 12) -> None:
        self._sequences = sequences

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels | None:
        group = public.group_of("q_proj", layer=1)
        rows = subtract_candidates(view).rows
        found = prefills(view, group)
        if not found:
            return None
        exchange, batch, length = found[0]
        seen = normalize(rows[exchange.order], dim=1).view(batch, length, -1)[: self._sequences]
        said = torch.empty((len(seen), 0), dtype=torch.long)
        every = torch.arange(public.vocabulary)
        for t in range(length):
            tries = torch.cat([said.repeat_interleave(len(every), dim=0), every.repeat(len(seen))[:, None]], dim=1)
            got = torch.cat([public.inputs(part)[group][:, -1] for part in tries.split(2048)])
            fit = (normalize(got.double(), dim=1).view(len(seen), len(every), -1) * seen[:, t, None]).sum(dim=-1)
            said = torch.cat([said, fit.argmax(dim=1, keepdim=True)], dim=1)
        return {exchange.order: said.flatten()}

    def score(self, guess: Labels, truth: Truth) -> Outcome:
        real = {}
        for order, said in guess.items():
            tokens = truth.calls[order].tokens
            assert tokens is not None  # a prompt has one row per token
            real[order] = tokens[: len(said)]
        return score_labels(guess, real)
