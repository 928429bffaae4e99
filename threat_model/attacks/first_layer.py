"""Attacks that read tokens from the first layer group: its rows come from a public table, one for each token."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from symbiosis_priv.arithmetic.ring import FORWARD
from threat_model.attacks.base import Labels, LabelsAttack, Outcome, score_labels
from threat_model.attacks.exchanges import noises, stack, unstack
from threat_model.evidence.public import Public
from threat_model.evidence.truth import Truth
from threat_model.evidence.views import ExecutorView

FIRST = 0
"""The first layer group."""


def first_layer_tokens(truth: Truth) -> dict[int, Tensor]:
    """The token of each row of the first group, by request: int64 `[n]`."""
    return {o: c.tokens for o, c in truth.of(group=FIRST, direction=FORWARD) if c.tokens is not None}


class FirstLayerAttack(LabelsAttack[ExecutorView]):
    """Guesses a token for each row of the first group, in all or in some of its requests."""

    def score(self, guess: Labels, truth: Truth) -> Outcome:
        return score_labels(guess, first_layer_tokens(truth))


class Averaging(FirstLayerAttack):
    """Takes the mean over sibling requests, then applies a matched filter against the vocabulary. Ignores known noise.

    The noise in the mean of M maskings of one row shrinks by sqrt(M); the row does not. q, k and v have the same input:
    if each is sent separately with its own noise, M = 3. A tenant that fuses siblings sends the row once.
    """

    name = "averaging siblings"
    family = "noise removal"
    sees = "rows of every group that reads the embedding, no noise"
    source = "rule 4"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels:
        siblings = next(group for group in public.siblings if FIRST in group)
        table = public.vocabulary_rows.double()
        streams = [noises(view, group, FORWARD)[1] for group in siblings]
        guessed = {}
        for same in zip(*streams, strict=True):
            mean = torch.stack([e.rows.double() for e in same]).mean(dim=0)
            # the likeliest row under isotropic noise; the scale of a ring row is unknown, so the best cosine is used
            # there
            bias = torch.zeros(()) if same[0].arithmetic == "ring" else table.square().sum(dim=1) / 2
            filters = normalize(table, dim=1) if same[0].arithmetic == "ring" else table
            guessed[same[0].order] = (mean @ filters.t() - bias).argmax(dim=1)
        return guessed


class SubspaceProjection(FirstLayerAttack):
    """Projects low-rank noise away by PCA; the rank is where the spectrum falls most steeply.

    K noise rows, and all their combinations, span K of d dimensions. If they are large, the first K principal axes of
    the received rows are that span. The other d - K coordinates of a row are matched with the vocabulary.
    """

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
        best: tuple[float, Tensor] | None = None
        for cut in {0, rank}:  # rank 0: there is nothing to project away
            rest = vectors[:, cut:]
            fit = normalize(x @ rest, dim=1) @ normalize(table @ rest, dim=1).t()
            sure = float(fit.amax(dim=1).mean())
            if best is None or sure > best[0]:
                best = sure, fit.argmax(dim=1)
        assert best is not None
        return unstack(best[1], online)


class RowScale(FirstLayerAttack):
    """Compares any header field that has one number per row with the scales of tokens.

    Quantisation needs one float per row. The largest entry of a first-layer row is nearly unique, so a tenant that sent
    the scale in clear would send the token.
    """

    name = "row scale in clear"
    family = "protocol"
    sees = "header fields of the first layer group"
    source = "rule 5"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels | None:
        _, scales = public.in_ring(FIRST, FORWARD, public.vocabulary_rows)
        table = scales[:, 0].log()
        guessed = {}
        for exchange in view.of(group=FIRST, direction=FORWARD):
            for value in exchange.fields.values():
                if isinstance(value, list | tuple) and len(value) == len(exchange.rows):
                    sent = torch.tensor(value, dtype=torch.float64).log()
                    guessed[exchange.order] = (sent[:, None] - table).abs().argmin(dim=1)
        return guessed or None


class EvenMasks(FirstLayerAttack):
    """Guesses the token whose integers agree with the row in the lowest bit of most entries.

    If two helpers expand the same stream, their shares n add up to 2n, whose lowest bit is 0. So the lowest bit of
    every entry is the row's own bit. A row has far more entries than a token has bits.
    """

    name = "even masks"
    family = "text"
    sees = "the lowest bit of each entry, first layer group"
    source = "rule 11"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels | None:
        table = _signs(public.in_ring(FIRST, FORWARD, public.vocabulary_rows, ring_bits=view.ring_bits)[0])
        exchanges = [e for e in view.of(group=FIRST, direction=FORWARD) if e.arithmetic == "ring"]
        return {e.order: (_signs(e.rows) @ table.t()).argmax(dim=1) for e in exchanges} or None


def _signs(rows: Tensor) -> Tensor:
    """Return 1.0 for even entries and -1.0 for odd entries, float32."""
    return 1.0 - 2.0 * (rows & 1)
