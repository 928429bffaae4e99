"""Measures on this machine how quantisation to the ring changes a model's output. No provider is involved."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, log_softmax

from symbiosis_priv.arithmetic.ring import row_blocks
from symbiosis_priv.checkpoints.weights import WeightStore


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Comparison of a model with the unquantised fp32 model on the same tokens. `top1` is the share of positions where
    both models rank the same token first, `min_cosine` the smallest cosine between their logits at one position,
    `kl` the mean Kullback-Leibler divergence of the compared model's predictions from fp32's, in nats."""

    tokens: int
    top1: float
    min_cosine: float
    kl: float
    perplexity: float
    reference_perplexity: float

    @property
    def perplexity_change(self) -> float:
        """Relative change of perplexity from the fp32 model to the compared model."""
        return self.perplexity / self.reference_perplexity - 1.0


@torch.no_grad()
def compare(
    reference: Any,
    model: Any,
    blocks: Sequence[list[int]],
    *,
    most: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Quality:
    """Run both models on blocks of token ids, each of at least two tokens, and compare every position. `most`: most
    tokens of one pass of `model`, which then reads the block with its cache; None for a block in one pass. `progress`
    is called with (blocks done, number of blocks)."""
    tokens = agree = 0
    nll = reference_nll = kl = 0.0
    min_cosine = 1.0
    for done, block in enumerate(blocks, start=1):
        ids = torch.tensor([block], dtype=torch.long, device="cpu")
        want, got = _logits(reference, ids), _logits(model, ids, most=most)
        target = ids[0, 1:]
        tokens += len(target)
        agree += int((want.argmax(-1) == got.argmax(-1)).sum())
        min_cosine = min(min_cosine, float(cosine_similarity(want, got, dim=-1).min()))
        kl += float(kl_div(log_softmax(got, -1), log_softmax(want, -1), log_target=True, reduction="sum"))
        reference_nll += float(cross_entropy(want, target, reduction="sum"))
        nll += float(cross_entropy(got, target, reduction="sum"))
        if progress:
            progress(done, len(blocks))
    return Quality(
        tokens=tokens,
        top1=agree / tokens,
        min_cosine=min_cosine,
        kl=kl / tokens,
        perplexity=math.exp(nll / tokens),
        reference_perplexity=math.exp(reference_nll / tokens),
    )


def _logits(model: Any, ids: Tensor, *, most: int | None = None) -> Tensor:
    """Return the logits of every position that has a next token: float64 `[tokens - 1, vocabulary]`."""
    found, cache = list[Tensor](), dict[str, Any]()
    for part in ids.to(model.device).split(most or ids.shape[1], dim=1):
        output = model(input_ids=part, **cache)
        found.append(output.logits[0])
        cache = {"past_key_values": output.past_key_values} if most else {}
    return torch.cat(found)[:-1].to(device="cpu", dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """Comparison of a model with the unquantised fp32 model by the cosines between their last hidden states of the same
    tokens."""

    vectors: int
    min_cosine: float
    mean_cosine: float


@torch.no_grad()
def compare_hidden_states(
    reference: Any, model: Any, blocks: Sequence[list[int]], *, progress: Callable[[int, int], None] | None = None
) -> Similarity:
    """Run both models on at least one block of token ids, and compare their last hidden states. `progress`: called with
    (blocks done, number of blocks)."""
    cosines = []
    for done, block in enumerate(blocks, start=1):
        want, got = _hidden_states(reference, block), _hidden_states(model, block)
        same = (want == got).all(dim=-1)  # padding may be all zeros, whose cosine is 0
        cosines.append(torch.where(same, 1.0, cosine_similarity(want, got, dim=-1)).flatten())
        if progress:
            progress(done, len(blocks))
    found = torch.cat(cosines)
    return Similarity(vectors=len(found), min_cosine=float(found.min()), mean_cosine=float(found.mean()))


def rounding(store: WeightStore) -> tuple[float, int]:
    """Measure what rounding to `weight_bits` changes. Returns the norm of all differences from the checkpoint's weights
    divided by the norm of the weights, and the number of layer groups that do not change at all. Reads one layer group
    at a time."""
    error = norm = 0.0
    unchanged = 0
    for index, entry in enumerate(store.manifest().groups):
        group, before = store.group(index), error
        rounded = zip(group.weight.split(entry.outputs), group.channel_scale.split(entry.outputs), strict=True)
        for layer, (integers, scale) in zip(store.layers(index), rounded, strict=True):
            for rows, columns, matrix in layer.blocks():
                held, step = integers[rows, columns], scale[rows, None]
                for start, stop in row_blocks(*held.shape):
                    exact = matrix[start:stop].to(torch.float64)
                    error += float((held[start:stop] * step[start:stop] - exact).square().sum())
                    norm += float(exact.square().sum())
        unchanged += error == before
    return math.sqrt(error / norm) if norm else 0.0, unchanged


def _hidden_states(model: Any, block: list[int]) -> Tensor:
    """Return the last hidden states of token ids: float64 `[tokens, width]`."""
    ids = torch.tensor([block], dtype=torch.long, device=model.device)
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    output = model(input_ids=ids, output_hidden_states=True, **decoder)
    found: Tensor = (output.decoder_hidden_states if decoder else output.hidden_states)[-1][0]
    return found.to(device="cpu", dtype=torch.float64)
