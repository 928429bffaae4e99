"""Stealing the adapter: LoRA is linear, and the executor sees rows on both sides of it (the paper's Figure 8).

At position 0 attention can only look at itself, so the input of `o_proj` there is `v = (W_v + BA) x`, repeated over
the heads of a key/value group. x is the input of `v_proj`. Both are rows that the executor is sent. The tenant's row
scales are unknown, so v is known up to a factor c_i per row:

    c_i v_i = (W_v + D) x_i

Eliminating M = W_v + D by least squares leaves `c^T (P o V V^T) c = min` with P the projector away from the rows of
x: c is the last eigenvector of a Hadamard product. One overall factor lambda remains. D has low rank, so nearly
every eigenvalue of `W_v M^+` is lambda: take their median. D = BA comes out up to the invertible factor between B
and A.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from threat_model.attacks.base import RECOVERED, Attack, Outcome
from threat_model.attacks.reading import prefills, subtract_candidates
from threat_model.public import Public
from threat_model.statistics import binomial_tail
from threat_model.truth import Truth
from threat_model.views import ExecutorView

_DECOYS = 9999


@dataclass(frozen=True, eq=False)
class StolenAdapter:
    """`B @ A` by module name, and the public weights that went into it."""

    updates: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


class AdapterExtraction(Attack[ExecutorView, StolenAdapter]):
    """Least squares between the input of `v_proj` and the input of `o_proj`, at the first position of every prompt."""

    name = "adapter by least squares"
    family = "adapter"
    party = "executor"
    sees = "rows into q/k/v and into o_proj, same prompts"
    source = "Symbiosis Figure 8; DESIGN §6"
    metric = "layers with BA within 1 %"
    chance = "0; the verdict uses 9,999 decoys per layer"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> StolenAdapter | None:
        rows = subtract_candidates(view).rows
        updates, weights = {}, {}
        for layer in range(public.layers):
            qkv, out = (public.group_of(name, layer=layer) for name in ("v_proj", "o_proj"))
            pairs = list(zip(prefills(view, qkv), prefills(view, out), strict=False))
            if not pairs:
                return None
            x = torch.cat([rows[a.order][::length] for (a, _, length), _ in pairs])
            o = torch.cat([rows[b.order][::length] for _, (b, _, length) in pairs])
            weight = public.served_weight(qkv, "v_proj", path=pairs[0][0][0].path)
            heads = int(public.model.config.num_key_value_heads)
            v = o.view(len(o), heads, -1, weight.shape[0] // heads).mean(dim=2).reshape(len(o), -1)
            name = f"model.layers.{layer}.self_attn.v_proj"
            updates[name], weights[name] = _solve(x, v, weight), weight
        return StolenAdapter(updates, weights)

    def score(self, guess: StolenAdapter, truth: Truth) -> Outcome:
        rng = torch.Generator().manual_seed(2)
        errors, first = [], 0
        for name, said in guess.updates.items():
            real = truth.updates[name].double()
            errors.append(float((said - real).norm() / real.norm()))
            first += _first_in_line_up(said, real, guess.weights[name], rng)
        layers = len(errors)
        outcome = Outcome(
            sum(error <= RECOVERED for error in errors),
            layers,
            0.0,
            binomial_tail(first, layers, 1 / (_DECOYS + 1)),
            {"worst relative error": max(errors), "best relative error": min(errors)},
        )
        names = set(guess.updates)
        real_part = {n: u for n, u in truth.updates.items() if n in names}
        stolen = {n: u.float() for n, u in guess.updates.items()} if outcome.broken else {}
        losses = {
            "loss, base model": truth.loss({}),
            "loss, stolen": truth.loss(stolen),
            "loss, true": truth.loss(real_part),
        }
        return replace(outcome, figures={**outcome.figures, **losses})


def _solve(x: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """D from rows x `[n, d]` and v `[n, o]` with `c_i v_i = (W + D) x_i`, c unknown."""
    x = x / x.norm(dim=1, keepdim=True)  # scales of x go into c as well
    v = v / v.norm(dim=1, keepdim=True)
    inverse = torch.linalg.pinv(x, rtol=1e-7)
    residual = torch.eye(len(x), dtype=x.dtype) - x @ inverse
    c = torch.linalg.eigh(residual * (v @ v.t())).eigenvectors[:, 0]
    matrix = (inverse @ (c[:, None] * v)).t()
    factor = torch.linalg.eigvals(weight @ torch.linalg.pinv(matrix, rtol=1e-9)).real.median()
    update: Tensor = factor * matrix - weight
    return update


def _first_in_line_up(said: Tensor, real: Tensor, weight: Tensor, rng: torch.Generator) -> bool:
    """Whether the guess fits the true matrix better than each decoy: the same matrix with columns flipped at random.

    What points along the public weight is taken out of the guess first: training may well move along it, and a guess
    that is nothing but the public weight must not get credit for that.
    """
    said = said - weight * ((said * weight).sum(dim=0) / weight.square().sum(dim=0))
    per_column = (said * real).sum(dim=0)
    signs = torch.randint(0, 2, (_DECOYS, len(per_column)), generator=rng).double() * 2 - 1
    return bool(per_column.sum() > (signs @ per_column).max())
