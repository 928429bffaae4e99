"""Causal attention of sequences, block by block with a running softmax (Milakov and Gimelshein, arXiv 1805.02867).

A row of the result depends only on its query and on the keys and values up to its position: not on the number of rows
that are computed together, nor on the division of a prompt into chunks. Blocks are added in the order of their
positions, and masked keys contribute exact zeros. `tests/tenant/endpoint/engine/test_attention.py` compares bits.

The compiled library computes all sequences of a step in one call (`native/local.h`). Without the library, for prompts
on a tenant with a GPU, and for dtypes that the library lacks, torch computes one sequence after the other, and each
product has the same shape (`ROWS` rows by `BLOCK` keys). The results of library and torch differ in the last bits.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.native import FORMATS, for_each_slice, pointer
from tenant.endpoint.engine.kv import BLOCK, KeyValues

ROWS = 16
"""Rows of a product: queries of neighbouring tokens that share a head of keys, and rows of zeros to fill up."""
TOKENS = 128
"""Number of tokens whose scores are in memory at a time: twice `heads * TOKENS * BLOCK` float32 values."""
FEW = 8
"""Most tokens of a sequence that are computed on the CPU if the queries are on a GPU: an answer's next token, and the
tokens of a guess."""
_LOWEST = -1e30  # finite, so that the difference of two such scores is 0


_DTYPES = (torch.float32, torch.bfloat16)
_MOST_WIDTH = 1024  # as in local.h
_SHARE = 1 << 18  # multiplications for which another thread pays off


class _Options(ctypes.Structure):
    """The C struct `attention` of native/local.h: the sizes and options of attention in one layer."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layer", "heads", "heads_kv", "key_width", "value_width")),
        *((name, ctypes.c_int64) for name in ("format", "window")),
        ("scaling", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("sinks", ctypes.c_void_p),
    )


class _Scores(NamedTuple):
    """How scores are computed (`Attention.attend`)."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class Attention:
    """Attention of the last tokens of some sequences, layer by layer. The rows are these tokens, in order. `new`:
    different sequences of one shape, each with its number of last tokens, for which `KeyValues.grow` was called."""

    def __init__(self, new: Sequence[tuple[KeyValues, int]]) -> None:
        self._new = new
        shape = self._shape = new[0][0].shape
        library = native.library()
        self._compiled = library if shape.dtype in _DTYPES and shape.value_width <= _MOST_WIDTH else None
        self._tables: list[Any] = []
        self._sequences: list[Any] = []  # the C structs `sequence` of native/local.h, for the layers of each kind
        self._pairs = sum(tokens * kv.length for kv, tokens in new)
        self._few: Attention | None = None  # of the sequences with few tokens, if queries are on a GPU
        if self._compiled is not None:
            self._isa = native.best(self._compiled)
            self._sizes = shape.heads, shape.key_width, shape.value_width, FORMATS[shape.dtype]
            for kind in range(len(shape.kinds)):
                fields: list[int] = []
                row = 0
                for kv, tokens in new:
                    addresses = kv.addresses(kind)
                    self._tables.append((ctypes.c_int64 * len(addresses))(*addresses))
                    fields += row, tokens, kv.length - tokens, ctypes.addressof(self._tables[-1])
                    row += tokens
                self._sequences.append((ctypes.c_int64 * len(fields))(*fields))

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Set keys `[rows, heads_kv, key_width]` and values `[rows, heads_kv, value_width]`, on any device."""
        if self._compiled is None:
            sizes = [tokens for _, tokens in self._new]
            for (kv, _), its_keys, its_values in zip(self._new, keys.split(sizes), values.split(sizes), strict=True):
                kv.write(layer, its_keys, its_values)
            return
        to = torch.device("cpu"), self._shape.dtype
        keys, values = keys.to(*to).contiguous(), values.to(*to).contiguous()
        kind, place = self._shape.places[layer]
        options = _Options(place, 0, *self._sizes)
        native.brief_library().local_append(
            ctypes.addressof(options), self._sequences[kind], len(self._new), keys.data_ptr(), values.data_ptr()
        )

    def attend(
        self,
        layer: int,
        queries: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention, after `append` was called for this layer.

        Scores are computed and accumulated in float32, or in float64 if the queries have it. Query head `h` uses head
        `h * heads_kv // heads` of keys and values, as in grouped-query attention.

        On a tenant with a GPU the blocks stay in host memory. Up to `FEW` tokens of a sequence are computed on the CPU,
        because copying all keys takes longer than reading them. More tokens (a prompt) are computed on the device of
        the queries, to which each block is copied once. This was not run on CUDA. Results on different devices differ
        in the last bits.

        Args:
            queries: `[rows, heads, key_width]`.
            scaling: factor of the scores.
            window: a token sees this many tokens, itself included; None for all.
            softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2); None for no cap.
            sinks: `[heads]`, a score per head that is part of the softmax and has no value vector (gpt-oss).

        Returns:
            `[rows, heads, value_width]` in the dtype and on the device of the queries.
        """
        how = _Scores(scaling, window, softcap, sinks)
        compiled = self._compiled is not None and queries.dtype in _DTYPES
        if compiled and queries.is_cpu:
            return self._by_library(layer, queries, how)
        parts = queries.split([tokens for _, tokens in self._new])
        few = [place for place, (_, tokens) in enumerate(self._new) if tokens <= FEW] if compiled else []
        results: dict[int, Tensor] = {}
        if few:
            near = torch.cat([parts[place] for place in few]).cpu()
            self._few = self._few or Attention([self._new[place] for place in few])
            found = self._few._by_library(layer, near, how).to(queries.device)
            results = dict(zip(few, found.split([self._new[place][1] for place in few]), strict=True))
        for place, ((kv, tokens), part) in enumerate(zip(self._new, parts, strict=True)):
            if place not in results:
                device = torch.device("cpu") if tokens <= FEW else queries.device
                moved = part.to(device, torch.promote_types(queries.dtype, torch.float32))
                results[place] = _attend(moved * scaling, kv.blocks(layer), kv.length - tokens, how).to(queries)
        return torch.cat([results[place] for place in range(len(parts))])

    def _by_library(self, layer: int, queries: Tensor, how: _Scores) -> Tensor:
        """`attend` of queries on the CPU."""
        rows, heads, width = queries.shape
        value_width = self._shape.value_width
        work = self._pairs * heads * (width + value_width)
        library = self._compiled if work > _SHARE else native.brief_library()
        assert library is not None
        given = queries.float().contiguous()
        sinks = None if how.sinks is None else how.sinks.detach().cpu().float().contiguous()
        kind, place = self._shape.places[layer]
        options = _Options(place, heads, *self._sizes, how.window or 0, how.scaling, how.softcap or 0.0, pointer(sinks))
        result = torch.empty((rows, heads, value_width), dtype=torch.float32, device="cpu")
        arguments = self._isa, ctypes.addressof(options), self._sequences[kind], given.data_ptr(), result.data_ptr()

        def compute(begin: int, end: int) -> None:
            library.local_attend(*arguments, begin, end)

        total = len(self._new) * self._shape.heads
        for_each_slice(compute, total=total, least=max(1, total * _SHARE // work))
        return result.to(queries.dtype)


def _attend(queries: Tensor, blocks: Mapping[int, tuple[Tensor, Tensor]], first: int, how: _Scores) -> Tensor:
    """Compute attention of neighbouring tokens of one sequence with torch.

    Args:
        queries: `[tokens, heads, key_width]`, scaled, of the positions from `first` on.
        blocks: keys `[heads_kv, key_width, BLOCK]` and values `[heads_kv, BLOCK, value_width]` of the sequence, by
            number, as far back as the window reaches. Entries after the last token must be finite.
    """
    heads_kv, _, value_width = blocks[first // BLOCK][1].shape
    parts = enumerate(queries.split(TOKENS))
    pieces = [_Piece(part, first + index * TOKENS, heads_kv, value_width, how) for index, part in parts]
    for index in range(pieces[0].blocks.start, pieces[-1].blocks.stop):
        # in the blocks' dtype, which is the smaller one
        keys, values = (part.to(queries.device).to(queries.dtype) for part in blocks[index])
        for piece in pieces:
            if index in piece.blocks:
                piece.add(index, keys, values)
    return torch.cat([piece.result() for piece in pieces])


class _Piece:
    """The running softmax of some neighbouring tokens. The arguments are those of `_attend`.

    Attributes:
        blocks: the numbers of the blocks that the tokens see.
    """

    def __init__(self, queries: Tensor, first: int, heads_kv: int, value_width: int, how: _Scores) -> None:
        self._first, self._window, self._softcap, window = first, how.window, how.softcap, how.window
        tokens, heads, width = self._shape = queries.shape
        self._last = first + tokens - 1
        self.blocks = range(0 if window is None else max(0, first - window + 1) // BLOCK, self._last // BLOCK + 1)
        self._group = group = heads // heads_kv
        self._per_tile = per_tile = max(1, ROWS // group)
        tiles, rows = -(-tokens // per_tile), -(-group // ROWS) * ROWS
        self._used = used = slice(0, per_tile * group)  # rows of a tile that are not filled up

        filled = torch.nn.functional.pad(queries, (0, 0, 0, 0, 0, tiles * per_tile - tokens))
        by_head = filled.view(tiles, per_tile, heads_kv, group, width).permute(2, 0, 1, 3, 4)
        self._tiled = queries.new_zeros(heads_kv, tiles, rows, width)
        self._tiled[:, :, used] = by_head.reshape(heads_kv, tiles, -1, width)
        self._position = first + torch.arange(tiles * per_tile, device=queries.device, dtype=torch.int64).view(
            tiles, per_tile, 1, 1
        )

        self._highest = queries.new_full((heads_kv, tiles, rows, 1), _LOWEST)
        self._total = torch.zeros_like(self._highest)
        if how.sinks is not None:
            sinks = how.sinks.to(queries)
            self._highest[:, :, used] = sinks.view(heads_kv, 1, group, 1).repeat(1, 1, per_tile, 1)
            self._total[:, :, used] = 1.0
        self._result = queries.new_zeros(heads_kv, tiles, rows, value_width)

    def add(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Add the next block: keys `[heads_kv, key_width, BLOCK]`, values `[heads_kv, BLOCK, value_width]`."""
        scores = _product(self._tiled, keys)
        if self._softcap is not None:
            scores.div_(self._softcap).tanh_().mul_(self._softcap)
        start, end, window = index * BLOCK, (index + 1) * BLOCK, self._window
        if end > self._first + 1 or (window is not None and start <= self._last - window):
            key = torch.arange(start, end, device=keys.device, dtype=torch.int64)
            hidden = key > self._position
            if window is not None:
                hidden |= key <= self._position - window
            bias = keys.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            scores[:, :, self._used].unflatten(2, (self._per_tile, self._group)).add_(bias)
        higher = torch.maximum(self._highest, scores.amax(-1, keepdim=True))
        weights = scores.sub_(higher).exp_()
        shrink = self._highest.sub_(higher).exp_()
        self._total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        self._result.mul_(shrink).add_(_product(weights, values))
        self._highest = higher

    def result(self) -> Tensor:
        """The attention, `[tokens, heads, value_width]`, after the last block."""
        tokens, heads, _ = self._shape
        heads_kv, value_width = self._result.shape[0], self._result.shape[-1]
        by_token = self._result.div_(self._total)[:, :, self._used].reshape(heads_kv, -1, self._group, value_width)
        return by_token.transpose(0, 1)[:tokens].reshape(tokens, heads, value_width)


def _product(rows: Tensor, columns: Tensor) -> Tensor:
    """Multiply `[heads, tiles, ROWS, n]` by `[heads, n, m]`, with one product per tile.

    Both widths are filled up to multiples of `ROWS`: for other widths, the alignment of a row depends on its place in
    the tile, and on some CPUs its bits too. `columns` is not copied if its widths are such multiples.
    """
    heads, tiles, _, inner = rows.shape
    width = columns.shape[2]
    if more := -inner % ROWS:
        rows = torch.nn.functional.pad(rows, (0, more))
    if more or width % ROWS:
        columns = torch.nn.functional.pad(columns, (0, -width % ROWS, 0, more))
    if tiles == 1:
        return torch.bmm(rows[:, 0], columns)[:, None, :, :width]
    result = rows.new_empty(*rows.shape[:3], columns.shape[2])
    for head in range(heads):
        torch.bmm(rows[head], columns[head].expand(tiles, -1, -1), out=result[head])
    return result[..., :width]
