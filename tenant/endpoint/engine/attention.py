"""Causal attention of one sequence, block by block with a running softmax (Milakov and Gimelshein, arXiv 1805.02867).

A row of the result depends on its query and on the keys and values up to its position, and on nothing else: not on
how many rows are computed with it, nor on where a prompt was cut into chunks. Each product has the same shape
(`ROWS` rows by `BLOCK` keys), keys of a block that a row must not see contribute exact zeros, and blocks are added in
the order of their positions. `tests/tenant/endpoint/engine/test_attention.py` compares bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tenant.endpoint.engine.kv import BLOCK

ROWS = 16
"""Rows of a product: queries of neighbouring tokens that share a head of keys, filled up with zeros."""
TOKENS = 128
"""Tokens whose scores are in memory at a time: `heads * TOKENS * BLOCK` float32 values, twice."""
_LOWEST = -1e30  # finite, so that the difference of two of them is 0


def attend(
    queries: Tensor,
    blocks: Sequence[tuple[Tensor, Tensor]],
    length: int,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention for the last tokens of one sequence.

    Scores are computed and accumulated in float32, or in float64 if the queries have it. Query head `h` uses head
    `h * heads_kv // heads` of keys and values, as in grouped-query attention.

    On a tenant with a GPU the blocks stay in host memory. Several tokens (a prompt) are computed on the device of the
    queries, to which each block is copied in its turn; one token is computed on the CPU, because copying all keys
    takes longer than reading them there. This was not run on CUDA; rows on different devices differ in their last bits.

    Args:
        queries: `[tokens, heads, key_width]`, of the positions `length - tokens` to `length - 1`.
        blocks: keys `[heads_kv, key_width, BLOCK]` and values `[heads_kv, BLOCK, value_width]` of the whole sequence;
            what lies behind `length` must be finite.
        length: tokens of the sequence, those of the queries included.
        scaling: factor of the scores.
        window: a token sees this many tokens, itself included; None for all.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2); None for no cap.
        sinks: `[heads]`, a score per head that takes part in the softmax and has no value (gpt-oss).

    Returns:
        `[tokens, heads, value_width]` in the dtype and on the device of the queries.
    """
    device = torch.device("cpu") if len(queries) == 1 else queries.device
    moved = queries.to(device, torch.promote_types(queries.dtype, torch.float32))
    first = length - len(queries)
    pieces = [
        _attend(
            piece * scaling,
            blocks,
            first + index * TOKENS,
            window=window,
            softcap=softcap,
            sinks=None if sinks is None else sinks.to(moved),
        )
        for index, piece in enumerate(moved.split(TOKENS))
    ]
    return torch.cat(pieces).to(queries)


def _attend(
    queries: Tensor,
    blocks: Sequence[tuple[Tensor, Tensor]],
    first: int,
    *,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    tokens, heads, width = queries.shape
    heads_kv, _, value_width = blocks[0][1].shape
    group = heads // heads_kv
    per_tile = max(1, ROWS // group)
    tiles, rows = -(-tokens // per_tile), -(-group // ROWS) * ROWS
    used = slice(0, per_tile * group)  # rows of a tile that are no filling

    filled = torch.nn.functional.pad(queries, (0, 0, 0, 0, 0, tiles * per_tile - tokens))
    by_head = filled.view(tiles, per_tile, heads_kv, group, width).permute(2, 0, 1, 3, 4)
    tiled = queries.new_zeros(heads_kv, tiles, rows, width)
    tiled[:, :, used] = by_head.reshape(heads_kv, tiles, -1, width)
    position = first + torch.arange(tiles * per_tile, device=queries.device, dtype=torch.int64).view(
        tiles, per_tile, 1, 1
    )

    highest = queries.new_full((heads_kv, tiles, rows, 1), _LOWEST)
    total = torch.zeros_like(highest)
    if sinks is not None:
        highest[:, :, used] = sinks.view(heads_kv, 1, group, 1).repeat(1, 1, per_tile, 1)
        total[:, :, used] = 1.0
    result = queries.new_zeros(heads_kv, tiles, rows, value_width)

    last = first + tokens - 1
    begin = 0 if window is None else max(0, first - window + 1) // BLOCK
    for index in range(begin, last // BLOCK + 1):
        keys, values = (part.to(queries) for part in blocks[index])
        scores = _product(tiled, keys)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        start, end = index * BLOCK, (index + 1) * BLOCK
        if end > first + 1 or (window is not None and start <= last - window):
            key = torch.arange(start, end, device=queries.device, dtype=torch.int64)
            hidden = key > position
            if window is not None:
                hidden |= key <= position - window
            bias = queries.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            scores[:, :, used].unflatten(2, (per_tile, group)).add_(bias)
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights = scores.sub_(higher).exp_()
        shrink = highest.sub_(higher).exp_()
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        result.mul_(shrink).add_(_product(weights, values))
        highest = higher
    by_token = result.div_(total)[:, :, used].reshape(heads_kv, -1, group, value_width)
    return by_token.transpose(0, 1)[:tokens].reshape(tokens, heads, value_width)


def _product(rows: Tensor, columns: Tensor) -> Tensor:
    """Multiply `[heads, tiles, ROWS, n]` by `[heads, n, m]`: a product per tile, without copies of `columns`."""
    heads, tiles = rows.shape[:2]
    if tiles == 1:
        return torch.bmm(rows[:, 0], columns)[:, None]
    result = rows.new_empty(*rows.shape[:3], columns.shape[2])
    for head in range(heads):
        torch.bmm(rows[head], columns[head].expand(tiles, -1, -1), out=result[head])
    return result
