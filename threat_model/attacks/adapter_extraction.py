"""Steals the adapter: LoRA is linear, and the executor sees rows on both sides of it (the paper's Figure 8).

For three kinds of linears, the executor sees the input, and later rows that depend on the output:

    v_proj      at position 0 attention sees only that position: the input of `o_proj` there is v, repeated over the
                heads of a key/value group
    o_proj      h' = h + W a: rows of q/k/v and of gate/up are h and h' after a public norm, so their directions are
        known
    down_proj   the same between gate/up and the next block (or the head)

Each linear gives equations `M x_i = sum_k z_ik y_ik` with M = W + BA, known rows x_i and y_ik, and unknown factors z:
lengths that a norm has removed, and the tenant's row scales. Eliminating M by least squares leaves
`z^T (P o Y Y^T) z = min` with P the projector onto the complement of the rows of x: z is the last eigenvector of a
Hadamard product. One overall factor lambda remains. BA has low rank, so nearly every eigenvalue of `W M^+` is lambda:
the attack takes their median. What remains after W is subtracted has a few large singular values and noise; the noise
is cut off. The result is BA, up to the invertible factor between B and A.

The outputs of q_proj and k_proj are visible only through the softmax, those of gate_proj and up_proj only through a
product of both. The linear algebra here cannot read them. This is a limit of the attack, and no proof about any scheme.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from threat_model.attacks.base import RECOVERED, Attack, Outcome
from threat_model.attacks.exchanges import Subtraction, generation, prefills, subtract_candidates
from threat_model.evidence.public import Public
from threat_model.evidence.statistics import binomial_tail
from threat_model.evidence.truth import Truth
from threat_model.evidence.views import Exchange, ExecutorView

_DECOYS = 9999
_ROWS = 320
_SHIFT, _ITERATIONS = 1e-13, 12


@dataclass(frozen=True, eq=False)
class Stolen:
    """The guess for one linear, float64 `[o, d]`: `B @ A`; a multiple of `W + B @ A`, before W was used; and W."""

    update: Tensor
    matrix: Tensor
    weight: Tensor


class AdapterExtraction(Attack[ExecutorView, Mapping[str, Stolen]]):
    """Least squares between the input of a linear and the rows that depend on its output, in generations."""

    name = "adapter by least squares"
    decisive = True
    sees = "forward rows of generations"
    source = "Symbiosis Figure 8"
    metric = "v, o and down projections with BA within 1 %"
    chance = "0; the verdict uses 9,999 decoys per projection"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Mapping[str, Stolen] | None:
        rows = subtract_candidates(view)
        if not prefills(view, 0):
            return None
        arithmetic = view.exchanges[0].arithmetic
        stolen = {}
        for name, x, y in _readable_linears(view, rows, public):
            pick = torch.randperm(len(x), generator=rng)[:_ROWS]
            group = public.group_of(name)
            stolen[name] = _solve(x[pick], y[pick], public.served_weight(group, name, arithmetic=arithmetic))
        return stolen

    def score(self, guess: Mapping[str, Stolen], truth: Truth) -> Outcome:
        rng = torch.Generator().manual_seed(2)
        errors, first = [], 0
        for name, stolen in guess.items():
            real = truth.updates[name].double()
            errors.append(float((stolen.update - real).norm() / real.norm()))
            first += _beats_decoys(stolen, real, rng)
        hits, p_value = sum(e <= RECOVERED for e in errors), binomial_tail(first, len(errors), 1 / (_DECOYS + 1))
        return Outcome(hits, len(errors), 0.0, p_value, {"worst relative error": max(errors)})


def _readable_linears(view: ExecutorView, rows: Subtraction, public: Public) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (module, inputs `[n, d]`, vectors that span its outputs `[n, k, o]`) for every readable linear."""
    config = public.model.config
    heads, groups = int(config.num_attention_heads), int(config.num_key_value_heads)
    for layer in range(public.layers):
        block = f"model.layers.{layer}."
        qkv, out, gate, down = (
            _requests(view, public.group_of(block + name))
            for name in ("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
        )
        # at the first positions
        x, o = (
            torch.cat(
                [rows.rows[e.order][::length] for e, _, length in prefills(view, public.group_of(name, layer=layer))]
            )
            for name in ("v_proj", "o_proj")
        )
        v = o.view(len(o), groups, heads // groups, -1).mean(dim=2).flatten(1)
        yield block + "self_attn.v_proj", x, v[:, None]
        before = _directions(public, rows, qkv, block + "input_layernorm")
        between = _directions(public, rows, gate, block + "post_attention_layernorm")
        yield block + "self_attn.o_proj", rows.of(out), torch.stack([before, between], dim=1)
        if layer + 1 < public.layers:
            following, norm = public.group_of("v_proj", layer=layer + 1), f"model.layers.{layer + 1}.input_layernorm"
        elif public.has("lm_head"):
            following, norm = public.group_of("lm_head"), "model.norm"
        else:
            continue  # a tied head is not offloaded
        after = _requests(view, following)
        # the rows that continue to the next group: all rows, or the last row of each sequence before the head
        last, start = [], 0
        for all_rows, some in zip(down, after, strict=True):
            length = len(all_rows.rows) // len(some.rows)
            last.append(torch.arange(start + length - 1, start + len(all_rows.rows), length))
            start += len(all_rows.rows)
        kept = torch.cat(last)
        parts = [between[kept], _directions(public, rows, after, norm)]
        yield block + "mlp.down_proj", rows.of(down)[kept], torch.stack(parts, dim=1)


def _requests(view: ExecutorView, index: int) -> list[Exchange]:
    return [e for e in generation(view) if e.group == index]


def _directions(public: Public, rows: Subtraction, requests: list[Exchange], norm: str) -> Tensor:
    """Unit vectors along the inputs of an RMS norm whose outputs were sent; float64 `[n, d]`."""
    scale: Tensor = public.model.get_submodule(norm).weight.double()  # type: ignore[assignment]
    return normalize(rows.of(requests) / scale, dim=1)


def _solve(x: Tensor, y: Tensor, weight: Tensor) -> Stolen:
    """Solve `M x_i = sum_k z_ik y_ik` for M, with x `[n, d]` and y `[n, k, o]` known and z unknown."""
    n, k, _ = y.shape
    x, y = normalize(x, dim=1), normalize(y, dim=2)  # the unknown lengths become part of z
    inverse = torch.linalg.pinv(x, rtol=1e-7)
    away = torch.eye(n, dtype=x.dtype) - x @ inverse
    flat = y.flatten(0, 1)
    form = ((flat @ flat.t()).view(n, k, n, k) * away[:, None, :, None]).view(n * k, n * k)
    # z is the eigenvector of the smallest eigenvalue, by inverse iteration; if the two smallest eigenvalues are close,
    # a combination of their eigenvectors
    shift = _SHIFT * form.diagonal().mean() * torch.eye(n * k, dtype=form.dtype)
    factors, pivots = torch.linalg.lu_factor(form + shift)
    z = torch.randn((n * k, 1), generator=torch.Generator().manual_seed(0), dtype=form.dtype)
    for _ in range(_ITERATIONS):
        z = normalize(torch.linalg.lu_solve(factors, pivots, z), dim=0)
    matrix = (inverse @ (z.view(n, k, 1) * y).sum(dim=1)).t()
    factor = torch.linalg.eigvals(weight @ torch.linalg.pinv(matrix, rtol=1e-9)).real.median()
    u, s, v = torch.linalg.svd(factor * matrix - weight, full_matrices=False)
    half = len(s) // 2
    # cut the spectrum at its steepest fall; the rest is noise
    rank = 1 + int((s[:half] / s[1 : half + 1].clamp(min=1e-300)).argmax())
    return Stolen((u[:, :rank] * s[:rank]) @ v[:rank], matrix, weight)


def _beats_decoys(stolen: Stolen, real: Tensor, rng: torch.Generator) -> bool:
    """Returns True if the guess fits the true update better than every decoy. A decoy is the update with random signs.
    The comparison uses `matrix`, and first removes the component along the public weight from each column. Training may
    move along the public weight, and a guess made only from public data must not count as a success."""
    guessed, weight = stolen.matrix, stolen.weight
    guessed = guessed - weight * ((guessed * weight).sum(dim=0) / weight.square().sum(dim=0))
    # M is known up to a factor; its sign follows from the sign of W
    per_column = (guessed * real).sum(dim=0) * (stolen.matrix * weight).sum().sign()
    kept = torch.randint(0, 2, (_DECOYS, len(per_column)), generator=rng, dtype=torch.int8).double()
    decoys = 2 * (kept @ per_column) - per_column.sum()  # the columns that are not kept have the other sign
    return bool(per_column.sum() > decoys.max())
