"""Keys and values of sequences, in host memory, in blocks of `BLOCK` tokens.

A sequence grows by whole blocks, so growing copies nothing, and sequences with a common beginning share its blocks. A
block is freed when no sequence uses it any more. Layers with the same window share blocks; a block that no later token
sees is released.

`Prefixes` keeps sequences that have ended, for requests that begin with the same tokens.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
"""Tokens of a block. `attention` computes block by block, so another number changes the last bits of results."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the keys and values of one token in one model. `windows`: for each layer with attention, the number of
    tokens that a token sees, itself included; None for all. `key_width`, `value_width`: values per head."""

    windows: tuple[int | None, ...]
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    @classmethod
    def from_config(cls, config: Any, dtype: torch.dtype) -> "Shape":
        """Read the sizes from the configuration of a decoder in transformers, or of a model with such a decoder.
        `layer_types` lists the layers with the window `sliding_window`; without it, all layers have the window."""
        config = config.get_text_config(decoder=True)
        queries, layers = config.num_attention_heads, config.num_hidden_layers
        width = getattr(config, "head_dim", None) or config.hidden_size // queries
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
        return cls(
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers]),
            heads=getattr(config, "num_key_value_heads", None) or queries,
            key_width=width,
            value_width=width,
            dtype=dtype,
        )

    @property
    def layers(self) -> int:
        """Number of layers with attention."""
        return len(self.windows)

    @cached_property
    def kinds(self) -> dict[int | None, int]:
        """The number of layers with each window. Layers of one kind, with the same window, share blocks."""
        return dict(Counter(self.windows))

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """For each layer, the index of its kind in `kinds`, and its index among the layers of this kind."""
        kinds = list(self.kinds)
        return [(kinds.index(window), self.windows[:i].count(window)) for i, window in enumerate(self.windows)]

    def bytes(self, tokens: int, *, step: int | None = None) -> int:
        """Return the largest number of bytes that a sequence takes while it grows to `tokens` and shares no block.
        `step`: largest number of tokens by which the sequence grows before `release` is called; None if it never is."""
        layers = 0
        for window, count in self.kinds.items():
            blocks = -(-tokens // BLOCK)
            if window is not None and step is not None:
                blocks = min(blocks, -(-(window + step - 2) // BLOCK) + 1)
            layers += blocks * count
        return layers * self.heads * BLOCK * (self.key_width + self.value_width) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class KVBlock:
    """Keys `[layers, heads, key_width, BLOCK]` and values `[layers, heads, BLOCK, value_width]` of `BLOCK` tokens, for
    the layers of one kind. Keys are transposed because products with few rows read them faster. Entries without a token
    are finite, because attention multiplies them by 0."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, shape: Shape, layers: int) -> "KVBlock":
        """Make a block of zeros."""
        size = (layers, shape.heads)
        return cls(
            torch.zeros(*size, shape.key_width, BLOCK, dtype=shape.dtype, device="cpu"),
            torch.zeros(*size, BLOCK, shape.value_width, dtype=shape.dtype, device="cpu"),
        )

    def copy(self) -> "KVBlock":
        """Return a block that shares no memory with this one."""
        return KVBlock(self.keys.clone(), self.values.clone())


class KeyValues:
    """Keys and values of one sequence.

    Attributes:
        length: number of tokens.

    Example:
        >>> kv = KeyValues(Shape.from_config(model.config, torch.float32))
        >>> kv.grow(3)
        >>> new = Attention([(kv, 3)])
        >>> new.append(0, keys, values)  # of 3 tokens in layer 0
        >>> new.attend(0, queries, scaling=64**-0.5)
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.length = 0
        self._blocks: list[list[KVBlock | None]] = [[] for _ in shape.kinds]  # by kind; None if released
        self._shared = 0  # number of leading blocks that other sequences may share, and that are never written

    @property
    def shortest(self) -> int:
        """The shortest length that `truncate` and `prefix` can return to."""
        released = [blocks.count(None) for blocks in self._blocks]
        pairs = zip(released, self.shape.kinds, strict=True)
        return max((n * BLOCK + (window or 0) - 1 for n, window in pairs if n), default=0)

    def grow(self, tokens: int) -> None:
        """Append tokens, in blocks that no other sequence uses. Their keys and values are finite."""
        if not tokens:
            return
        first = self.length // BLOCK
        if first < self._shared:  # after `truncate`
            for blocks in self._blocks:
                block = blocks[first]
                blocks[first] = block and block.copy()
            self._shared = first
        self.length += tokens
        for layers, blocks in zip(self.shape.kinds.values(), self._blocks, strict=True):
            while len(blocks) * BLOCK < self.length:
                blocks.append(KVBlock.empty(self.shape, layers))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Set keys `[tokens, heads, key_width]` and values `[tokens, heads, value_width]`, on any device, of the last
        tokens of a layer."""
        kind, layer = self.shape.places[layer]
        done, tokens = 0, len(keys)
        while done < tokens:
            index, start = divmod(self.length - tokens + done, BLOCK)
            count = min(BLOCK - start, tokens - done)
            block, place, new = self._blocks[kind][index], slice(start, start + count), slice(done, done + count)
            assert block is not None
            block.keys[layer, :, :, place] = keys[new].permute(1, 2, 0)
            block.values[layer, :, place] = values[new].transpose(0, 1)
            done += count

    def blocks(self, layer: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return keys `[heads, key_width, BLOCK]` and values `[heads, BLOCK, value_width]` of the blocks of a layer, by
        number. Released blocks are missing."""
        kind, place = self.shape.places[layer]
        return {i: (block.keys[place], block.values[place]) for i, block in enumerate(self._blocks[kind]) if block}

    def addresses(self, kind: int) -> list[int]:
        """Return the addresses of the keys and values of each block of a kind, alternating; 0 if released."""
        pairs = [(b.keys.data_ptr(), b.values.data_ptr()) if b else (0, 0) for b in self._blocks[kind]]
        return [address for pair in pairs for address in pair]

    def release(self) -> None:
        """Free the blocks that no later token sees."""
        for window, blocks in zip(self.shape.kinds, self._blocks, strict=True):
            if window is not None:
                hidden = max(0, self.length - window + 1) // BLOCK
                blocks[:hidden] = [None] * hidden

    def truncate(self, length: int) -> None:
        """Remove the tokens from index `length` on, which is at least `shortest`."""
        self.length = min(self.length, length)
        assert self.length >= self.shortest
        for blocks in self._blocks:
            del blocks[-(-self.length // BLOCK) :]
        self._shared = min(self._shared, -(-self.length // BLOCK))

    def prefix(self, length: int) -> "KeyValues":
        """Return a sequence with the first `length` tokens of this one, at least `shortest`. Full blocks are shared,
        the rest is copied."""
        assert length >= self.shortest
        other = KeyValues(self.shape)
        full, rest = divmod(length, BLOCK)
        for blocks, others in zip(self._blocks, other._blocks, strict=True):
            others += blocks[:full]
            if rest:
                block = blocks[full]
                others.append(block and block.copy())
        other.length = length
        other._shared = full
        self._shared = max(self._shared, full)
        return other


def held_bytes(sequences: Iterable[KeyValues]) -> int:
    """Return the bytes of these sequences, counting each shared block once."""
    held = {id(block): block for kv in sequences for blocks in kv._blocks for block in blocks if block}
    return sum(block.keys.nbytes + block.values.nbytes for block in held.values())


class Prefixes:
    """A cache of sequences that have ended, ordered by last use.

    Keys and values of a token have the same bits in every step (`row_blocks`, `attention`), so any common beginning
    can be used. They depend on the adapter and its load, because an adapter that is loaded again may have changed.
    If a sequence has released blocks of a sliding window, only its longest beginnings can be used.

    A client finds only its own sequences. Otherwise a client could guess the texts of others token by token: the
    number of cached tokens, which answers state and times reveal, would show how much of a guess is right.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Hashable, tuple[int, ...]], KeyValues] = OrderedDict()

    @property
    def bytes(self) -> int:
        """Bytes of the cached sequences."""
        return held_bytes(self._kept.values())

    def keep(self, owner: Hashable, tokens: Sequence[int], kv: KeyValues) -> None:
        """Keep a sequence that has ended. It replaces cached sequences that are beginnings of it. `owner`: identifies
        the client, the adapter and its load. `kv`: keys and values; the caller must not use them afterwards."""
        tokens = tuple(tokens)
        for key in [key for key in self._kept if key[0] == owner]:
            if key[1] == tokens[: len(key[1])] and kv.shortest <= len(key[1]):
                del self._kept[key]
            elif tokens == key[1][: len(tokens)] and self._kept[key].shortest <= len(tokens):
                self._kept.move_to_end(key)
                return
        if tokens:
            self._kept[owner, tokens] = kv

    def find(self, owner: Hashable, tokens: Sequence[int]) -> KeyValues | None:
        """Return keys and values of the longest cached beginning of `tokens`, or None."""
        tokens = tuple(tokens)
        common: dict[tuple[Hashable, tuple[int, ...]], int] = {}
        for key in self._kept:
            if key[0] == owner:  # the number of equal tokens at the beginning
                low, high = 0, min(len(key[1]), len(tokens))
                while low < high:
                    middle = (low + high + 1) // 2
                    if key[1][low:middle] == tokens[low:middle]:
                        low = middle
                    else:
                        high = middle - 1
                common[key] = low
        usable = [key for key, length in common.items() if length >= max(1, self._kept[key].shortest)]
        if not usable:
            return None
        key = max(usable, key=common.__getitem__)
        length = common[key]
        self._kept.move_to_end(key)
        return self._kept[key].prefix(length)

    def drop_one(self) -> bool:
        """Free the least recently used sequence. Returns False if there is none."""
        return bool(self._kept and self._kept.popitem(last=False))
