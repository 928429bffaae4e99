"""Attacks on content by a helper and by a second tenant. Neither receives any data that depends on rows."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from symbiosis_priv.arithmetic.ring import FORWARD
from threat_model.attacks.base import Attack, Outcome
from threat_model.attacks.collusion import pad_rows
from threat_model.attacks.first_layer import FIRST, first_layer_tokens
from threat_model.evidence.public import Public
from threat_model.evidence.statistics import agreement_by_chance, binomial_tail
from threat_model.evidence.truth import Truth
from threat_model.evidence.views import HelperView, NeighbourView


class HelperAlone(Attack[HelperView, Tensor]):
    """Treats the pad rows that a helper expands as rows, and matches them with the vocabulary in order."""

    name = "helper's pads as rows"
    family = "collusion"
    party = "helper"
    sees = "seeds, row ranges, effects"
    source = "threat model, pad"
    metric = "tokens"
    chance = "guesses dealt to random rows"

    def run(self, view: HelperView, public: Public, rng: torch.Generator) -> Tensor | None:
        pads = pad_rows([view], public, FIRST, FORWARD)[1].double()
        if not len(pads):
            return None
        table = normalize(public.vocabulary_rows.double(), dim=1)
        return (normalize(pads, dim=1) @ table.t()).argmax(dim=1)

    def score(self, guess: Tensor, truth: Truth) -> Outcome:
        real = torch.cat(list(first_layer_tokens(truth).values()))
        n = min(len(real), len(guess))
        hits, chance = int((guess[:n] == real[:n]).sum()), agreement_by_chance(guess[:n], real[:n])
        return Outcome(hits, n, chance, binomial_tail(hits, n, chance))


class MixedBatches(Attack[NeighbourView, Tensor]):
    """A second tenant's rows share products with the victim's. Tests if the victim's rows change the second tenant's
    answers."""

    name = "neighbour in the same batch"
    family = "protocol"
    party = "neighbour"
    sees = "its own rows and answers"
    source = "threat model, between tenants"
    metric = "answers that are not its own product"
    chance = "0"

    def run(self, view: NeighbourView, public: Public, rng: torch.Generator) -> Tensor:
        return (view.own != 0).any(dim=1)

    def score(self, guess: Tensor, truth: Truth) -> Outcome:
        hits = int(guess.sum())
        return Outcome(hits, len(guess), 0.0, 0.0 if hits else 1.0)
