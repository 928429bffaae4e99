"""Attacks that recover text: tokens from forward rows, and labels from backward rows.

The embedding is public, so an attacker looks up rows of the first layer in a table. The gradient of cross-entropy
reveals the label: at the head, `g = (softmax(z) - onehot(y)) / n`, whose only negative entry is the label's (Zhao et
al., iDLG, arXiv 2001.02610). If the head stays with the tenant, the last block's gradient still points away from the
label's row of the head.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD
from threat_model.attacks.base import Labels, LabelsAttack, Outcome, score_labels
from threat_model.attacks.exchanges import noises, prefills, stack, subtract_candidates, unfold, unstack
from threat_model.evidence.public import Public
from threat_model.evidence.truth import NO_LABEL, Truth
from threat_model.evidence.views import ExecutorView

FIRST = 0
"""The first layer group."""


def first_layer_tokens(truth: Truth) -> dict[int, Tensor]:
    """The token of each row of the first group, by request: int64 `[n]`."""
    return {o: c.tokens for o, c in truth.of(index=FIRST, direction=FORWARD).items() if c.tokens is not None}


class FirstLayerAttack(LabelsAttack[ExecutorView]):
    """Guesses a token for each row of the first group, in all or in some of its requests."""

    def score(self, guess: Labels, truth: Truth) -> Outcome:
        return score_labels(guess, first_layer_tokens(truth))


class Averaging(FirstLayerAttack):
    """Takes the mean over sibling requests, then applies a matched filter against the vocabulary. Ignores known noise.
    The noise in the mean of M maskings of one row shrinks by sqrt(M); the row does not. q, k and v have the same input:
    if each is sent separately with its own noise, M = 3. A tenant that fuses siblings sends the row once."""

    name = "averaging siblings"
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
    """Projects low-rank noise away by PCA; the rank is where the spectrum falls most steeply. K noise rows, and all
    their combinations, span K of d dimensions. If they are large, the first K principal axes of the received rows are
    that span. The other d - K coordinates of a row are matched with the vocabulary."""

    name = "subspace projection (PCA)"
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
        found = []
        for cut in (0, rank):  # rank 0: there is nothing to project away
            rest = vectors[:, cut:]
            fit = normalize(x @ rest, dim=1) @ normalize(table @ rest, dim=1).t()
            found.append((float(fit.amax(dim=1).mean()), fit.argmax(dim=1)))
        return unstack(max(found, key=lambda one: one[0])[1], online)


class RowScale(FirstLayerAttack):
    """Compares any header field that has one number per row with the scales of tokens. Quantisation needs one float per
    row. The largest entry of a first-layer row is nearly unique, so a scale in clear would tell the token."""

    name = "row scale in clear"
    sees = "header fields of the first layer group"
    source = "rule 5"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels | None:
        _, scales = public.in_ring(FIRST, FORWARD, public.vocabulary_rows)
        table = scales[:, 0].log()
        guessed = {}
        for exchange in view.of(index=FIRST, direction=FORWARD):
            for value in exchange.fields.values():
                if isinstance(value, list | tuple) and len(value) == len(exchange.rows):
                    sent = torch.tensor(value, dtype=torch.float64).log()
                    guessed[exchange.order] = (sent[:, None] - table).abs().argmin(dim=1)
        return guessed or None


class EvenMasks(FirstLayerAttack):
    """Guesses the token whose integers agree with the row in the lowest bit of most entries. If two helpers expand the
    same stream, their shares n add up to 2n, whose lowest bit is 0. So the lowest bit of every entry is the row's own
    bit. A row has far more entries than a token has bits."""

    name = "even masks"
    sees = "the lowest bit of each entry, first layer group"
    source = "rule 11"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels | None:
        def signs(rows: Tensor) -> Tensor:
            return 1.0 - 2.0 * (rows & 1)  # 1.0 for even entries

        table = signs(public.in_ring(FIRST, FORWARD, public.vocabulary_rows, ring_bits=view.ring_bits)[0])
        exchanges = [e for e in view.of(index=FIRST, direction=FORWARD) if e.arithmetic == "ring"]
        return {e.order: (signs(e.rows) @ table.t()).argmax(dim=1) for e in exchanges} or None


_RIDGE, _SHRINKAGE = 0.01, 0.05
_PROMPTS = 80  # prompts that the attack on a deeper layer reads; its time grows with them


class FirstLayerTokens(FirstLayerAttack):
    """Subtracts candidates from a row, and guesses the token whose normed embedding has the largest cosine with it. A
    secret scale does not change the cosine. A row of zeros is read as the token whose own row is zero (padding)."""

    name = "tokens, first layer"
    decisive = True
    sees = "rows of the first layer group"
    source = "threat model, none"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels:
        table = normalize(public.vocabulary_rows.double(), dim=1)
        padding = (table == 0).all(dim=1).to(table.dtype)
        left, guessed = subtract_candidates(view).rows, {}
        for order in (e.order for e in view.of(index=FIRST, direction=FORWARD) if e.order in left):
            empty = (left[order] == 0).all(dim=1).to(table.dtype)
            cosine = normalize(left[order], dim=1) @ table.t() + torch.outer(empty, padding)
            guessed[order] = cosine.argmax(dim=1)
        return guessed


class DeepLayerTokens(LabelsAttack[ExecutorView]):
    """Reads tokens from a deeper layer: runs the public model on every possible next token, and keeps the best fit. The
    search is greedy: position t is decided after all positions before it, so the cost is vocabulary x length and not
    vocabulary ^ length. The tenant's adapters are unknown, but they change activations in a similar way for all tokens.
    So the attack reads all prompts once, fits a linear map from the public model's activations to the received ones,
    and reads every prompt again with that map."""

    name = "tokens, deep layer"
    decisive = True
    sees = "rows of the second block alone"
    source = "activation matching"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels | None:
        group = public.group_of("q_proj", layer=1)
        found = prefills(view, group)
        if not found:
            return None
        exchange, batch, length = found[0]
        rows = normalize(subtract_candidates(view).rows[exchange.order], dim=1)
        prompts = rows.view(batch, length, -1)[:_PROMPTS]
        rows = prompts.flatten(0, 1)
        none = torch.eye(rows.shape[1], dtype=rows.dtype)
        guessed = _read(prompts, public, group, drift=none, metric=none)
        known = normalize(public.inputs_at(group, guessed).double(), dim=-1).flatten(0, 1)
        # ridge regression from public activations to seen ones, and the root of the inverse covariance of the rest
        n, width = known.shape
        ridge = _RIDGE * n / width * none
        drift = none + torch.linalg.solve(known.t() @ known + ridge, known.t() @ (rows - known))
        rest = rows - known @ drift
        covariance = rest.t() @ rest / n
        covariance += _SHRINKAGE * covariance.diagonal().mean() * none
        metric = torch.linalg.cholesky(torch.linalg.inv(covariance))
        return {exchange.order: _read(prompts, public, group, drift=drift, metric=metric).flatten()}

    def score(self, guess: Labels, truth: Truth) -> Outcome:
        ((order, found),) = guess.items()
        tokens = truth.calls[order].tokens
        assert tokens is not None  # a prompt has one row per token
        return score_labels(guess, {order: tokens[: len(found)]})


def _read(rows: Tensor, public: Public, index: int, *, drift: Tensor, metric: Tensor) -> Tensor:
    """Tokens `[b, t]` whose activations, after the linear map, are nearest to rows `[b, t, d]`."""
    prefixes, which = torch.empty((1, 0), dtype=torch.long), torch.zeros(len(rows), dtype=torch.long)
    for t in range(rows.shape[1]):
        tries = normalize(public.next_inputs(index, prefixes).double(), dim=-1) @ (drift @ metric)
        # |a - b|^2 without |b|^2, which is the same for every token
        inner = torch.bmm(tries[which], (rows[:, t] @ metric)[:, :, None])[..., 0]
        distance = tries.square().sum(dim=2)[which] - 2 * inner
        guessed = torch.cat([prefixes[which], distance.argmin(dim=1, keepdim=True)], dim=1)
        prefixes, which = guessed.unique(dim=0, return_inverse=True)  # many prompts begin alike, so results are cached
    return prefixes[which]


class _GradientAttack(LabelsAttack[ExecutorView]):
    metric = "labels"

    def score(self, guess: Labels, truth: Truth) -> Outcome:
        return score_labels(guess, {order: call.labels for order, call in truth.calls.items()}, ignore=NO_LABEL)


class HeadLabels(_GradientAttack):
    """Guesses the position of the smallest entry of each backward row of the LM head."""

    name = "labels from head gradients"
    decisive = True
    sees = "backward rows of the LM head"
    source = "iDLG, arXiv 2001.02610"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels | None:
        if not public.has("lm_head"):
            return None  # a tied head never leaves the tenant
        head = public.group_of("lm_head")
        rows = subtract_candidates(view).rows
        online = [e for e in view.of(index=head, direction=BACKWARD) if e.order in rows]
        return {e.order: unfold(public, e, rows[e.order]).argmin(dim=1) for e in online} or None


class BlockLabels(_GradientAttack):
    """Guesses `argmin_v <g, gamma * head_v>` for each backward row g of the last block: the token v whose row of the
    head, times the weight gamma of the final norm, points away from g the most. Works with a tied head, too."""

    name = "labels from block gradients"
    sees = "backward rows of the last block"
    source = "iDLG through the final norm"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels | None:
        group = public.group_of("down_proj", layer=public.layers - 1)
        head: Tensor = public.model.get_output_embeddings().weight.double()
        final_norm: Tensor = public.model.get_submodule("model.norm").weight.double()  # type: ignore[assignment]
        directions = head * final_norm
        directions = directions - directions.mean(dim=0)
        rows = subtract_candidates(view).rows
        online = [e for e in view.of(index=group, direction=BACKWARD) if e.order in rows]
        return {e.order: (unfold(public, e, rows[e.order]) @ directions.t()).argmin(dim=1) for e in online} or None
