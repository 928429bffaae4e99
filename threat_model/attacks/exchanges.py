"""Preparation steps of an executor's attacks: separate requests by purpose, and subtract known noise."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import BACKWARD, DIRECTIONS, Direction
from threat_model.evidence.public import Public
from threat_model.evidence.views import Exchange, ExecutorView

_PASSES = 6


def noises(view: ExecutorView, index: int, direction: Direction) -> tuple[Tensor | None, tuple[Exchange, ...]]:
    """Return (noise `[k, d]` or None, the other exchanges) of a group and direction. A tenant without a helper must ask
    the executor itself for the effect of its noise: the first bias-free request."""
    found = view.of(index=index, direction=direction)
    if found and found[0].arithmetic == "float_bias_free":
        return found[0].rows.double(), found[1:]
    return None, found


def stack(exchanges: Sequence[Exchange]) -> Tensor:
    """The rows of all exchanges as one float64 matrix `[n, d]`."""
    return torch.cat([e.rows for e in exchanges]).double()


def unstack(values: Tensor, exchanges: Sequence[Exchange]) -> dict[int, Tensor]:
    """The inverse of `stack`: one value or row of values `[n, ...]` per stacked row, by order of the request."""
    parts = values.split([len(e.rows) for e in exchanges])
    return {e.order: part for e, part in zip(exchanges, parts, strict=True)}


@dataclass(frozen=True, eq=False)
class Subtraction:
    """Rows after subtraction of the best candidate, by order, and the number of candidates that were tried."""

    rows: Mapping[int, Tensor]
    trials: int
    pools: tuple[int, ...]

    def of(self, exchanges: Sequence[Exchange]) -> Tensor:
        """The rows of these exchanges as one matrix `[n, d]`."""
        return torch.cat([self.rows[e.order] for e in exchanges])


@functools.lru_cache(maxsize=4)
def subtract_candidates(view: ExecutorView) -> Subtraction:
    """Subtract from every online row the candidate that leaves the likeliest remainder, layer by layer: `argmin_k (x' -
    n_k)^T C^-1 (x' - n_k)`. C is first the identity, then Tyler's scatter of the recovered rows, which weighs all rows
    alike, so that a few long gradients do not dominate. There are (rows x pool size) distances per layer."""
    rows: dict[int, Tensor] = {}
    trials, pools = 0, []
    groups = {e.group for e in view.exchanges}
    for group in sorted(groups):
        for direction in DIRECTIONS:
            candidates, online = noises(view, group, direction)
            if not online:
                continue
            x = stack(online)
            if candidates is not None:
                x = _likeliest(x, candidates)
                trials += len(x) * len(candidates)
                pools.append(len(candidates))
            rows |= unstack(x, online)
    return Subtraction(rows, trials, tuple(pools))


def _likeliest(x: Tensor, candidates: Tensor) -> Tensor:
    basis = torch.eye(x.shape[1], dtype=torch.float64)
    for _ in range(_PASSES):
        # one matrix product instead of a [rows, k, d] tensor: |a - b|^2 = |a|^2 - 2ab + |b|^2, without |a|^2
        a, b = x @ basis, candidates @ basis
        pick = (b.square().sum(dim=1) - 2 * a @ b.t()).argmin(dim=1)
        best = x - candidates[pick]
        length = (a - b[pick]).square().mean(dim=1, keepdim=True)
        weight = 1 / (length + 1e-12 * length.mean()).clamp(min=1e-300)
        values, vectors = torch.linalg.eigh((best * weight).t() @ best / weight.sum())
        basis = vectors * (values + 1e-2 * values.mean()).clamp(min=1e-300).rsqrt()
    return best


def unfold(public: Public, exchange: Exchange, rows: Tensor) -> Tensor:
    """Gradient rows `[r, d]` without the public weight scales that the ring path folds in."""
    if exchange.direction == BACKWARD and exchange.arithmetic == "ring":
        return rows / public.quantised(exchange.group).channel_scale
    return rows


def generation(view: ExecutorView) -> tuple[Exchange, ...]:
    """The requests after the last training step, that is after the last gradient."""
    last = max((e.order for e in view.exchanges if e.direction == BACKWARD), default=-1)
    return tuple(e for e in view.exchanges if e.order > last)


def prefills(view: ExecutorView, index: int) -> list[tuple[Exchange, int, int]]:
    """(request, sequences, tokens of each) for every prompt. A generated token has one row per sequence."""
    pairs = itertools.pairwise(e for e in generation(view) if e.group == index)
    sizes = [(first, len(first.rows), len(second.rows)) for first, second in pairs]
    return [(e, batch, rows // batch) for e, rows, batch in sizes if rows > batch and rows % batch == 0]
