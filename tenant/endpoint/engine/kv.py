"""Keys and values of sequences, in host memory, in blocks of `BLOCK` tokens.

A sequence grows by whole blocks, so nothing is copied when it grows, and sequences with a common beginning share the
blocks of it. Memory is freed when the last sequence that uses a block is gone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
"""Tokens of a block. `attention` computes block by block: another number changes the last bits of its results."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the keys and values of one token in one model.

    Args:
        layers: number of layers with attention.
        heads: heads of keys and values.
        key_width, value_width: values per head.
        dtype: as the model computes them.
    """

    layers: int
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    @classmethod
    def from_config(cls, config: Any, dtype: torch.dtype) -> "Shape":
        """Read the sizes from the configuration of a decoder in transformers, or of a model with such a decoder."""
        config = config.get_text_config(decoder=True)
        queries = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // queries
        return cls(
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or queries,
            key_width=width,
            value_width=width,
            dtype=dtype,
        )

    def bytes(self, tokens: int) -> int:
        """Return the memory of a sequence of `tokens` that shares no block."""
        return -(-tokens // BLOCK) * self.block_bytes

    @property
    def block_bytes(self) -> int:
        """Memory of one block of all layers."""
        return self.layers * self.heads * BLOCK * (self.key_width + self.value_width) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Block:
    """Keys `[layers, heads, key_width, BLOCK]` and values `[layers, heads, BLOCK, value_width]` of `BLOCK` tokens.

    Keys are transposed because products with few rows read them faster. Places without a token are finite: attention
    multiplies them by 0.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, shape: Shape) -> "Block":
        """Make a block of zeros."""
        size = (shape.layers, shape.heads)
        return cls(
            torch.zeros(*size, shape.key_width, BLOCK, dtype=shape.dtype, device="cpu"),
            torch.zeros(*size, BLOCK, shape.value_width, dtype=shape.dtype, device="cpu"),
        )

    def copy(self) -> "Block":
        """Return a block that shares no memory with this one."""
        return Block(self.keys.clone(), self.values.clone())


class KeyValues:
    """Keys and values of one sequence.

    Args:
        shape: sizes of the model.

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
        self._blocks: list[Block] = []
        self._shared = 0  # this many leading blocks may belong to other sequences too: never written

    def grow(self, tokens: int) -> None:
        """Make room for more tokens, in blocks that no other sequence uses. Their keys and values are finite."""
        if not tokens:
            return
        first = self.length // BLOCK
        if first < self._shared:  # after `truncate`
            self._blocks[first] = self._blocks[first].copy()
            self._shared = first
        self.length += tokens
        while len(self._blocks) * BLOCK < self.length:
            self._blocks.append(Block.empty(self.shape))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Set keys `[tokens, heads, key_width]` and values `[tokens, heads, value_width]` of the last tokens of a
        layer. They may be on any device."""
        done, tokens = 0, len(keys)
        while done < tokens:
            index, start = divmod(self.length - tokens + done, BLOCK)
            count = min(BLOCK - start, tokens - done)
            block, place, new = self._blocks[index], slice(start, start + count), slice(done, done + count)
            block.keys[layer, :, :, place] = keys[new].permute(1, 2, 0)
            block.values[layer, :, place] = values[new].transpose(0, 1)
            done += count

    def blocks(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return keys `[heads, key_width, BLOCK]` and values `[heads, BLOCK, value_width]` of each block of a layer."""
        return [(block.keys[layer], block.values[layer]) for block in self._blocks]

    def addresses(self) -> list[int]:
        """Return the addresses of keys and values of each block, one after the other."""
        return [part.data_ptr() for block in self._blocks for part in (block.keys, block.values)]

    def truncate(self, length: int) -> None:
        """Forget tokens from `length` on."""
        self.length = min(self.length, length)
        del self._blocks[-(-self.length // BLOCK) :]
        self._shared = min(self._shared, len(self._blocks))

    def prefix(self, length: int) -> "KeyValues":
        """Return a sequence with the first `length` tokens of this one. Full blocks are shared, the rest is copied."""
        other = KeyValues(self.shape)
        full, rest = divmod(length, BLOCK)
        other._blocks = self._blocks[:full]
        if rest:
            other._blocks.append(self._blocks[full].copy())
        other.length = length
        other._shared = full
        self._shared = max(self._shared, full)
        return other


def held_bytes(sequences: Iterable[KeyValues]) -> int:
    """Return the memory of these sequences, with each shared block counted once."""
    return sum({id(block): kv.shape.block_bytes for kv in sequences for block in kv._blocks}.values())
