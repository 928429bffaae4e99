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

    Example:
        >>> kv = KeyValues(Shape.from_config(model.config, torch.float32))
        >>> kv.append(0, keys, values)  # of the new tokens in layer 0, then in each other layer
        >>> attend(queries, kv.blocks(0), kv.length(0), scaling=64**-0.5)
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._blocks: list[Block] = []
        self._shared = 0  # this many leading blocks may belong to other sequences too: never written
        self._lengths = [0] * shape.layers

    def length(self, layer: int | None = None) -> int:
        """Return the number of tokens of a layer, or without a layer those that all layers have."""
        return min(self._lengths) if layer is None else self._lengths[layer]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Add tokens to a layer.

        Args:
            layer: index of the layer.
            keys: `[tokens, heads, key_width]`, on any device; copied.
            values: `[tokens, heads, value_width]`.
        """
        done, tokens = 0, keys.shape[0]
        while done < tokens:
            index, start = divmod(self._lengths[layer], BLOCK)
            count = min(BLOCK - start, tokens - done)
            block = self._writable(index)
            place, new = slice(start, start + count), slice(done, done + count)
            block.keys[layer, :, :, place] = keys[new].permute(1, 2, 0)
            block.values[layer, :, place] = values[new].transpose(0, 1)
            self._lengths[layer] += count
            done += count

    def blocks(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return keys `[heads, key_width, BLOCK]` and values `[heads, BLOCK, value_width]` of each block of a layer."""
        return [(block.keys[layer], block.values[layer]) for block in self._blocks]

    def truncate(self, length: int) -> None:
        """Forget tokens from `length` on, in layers that have them."""
        self._lengths = [min(old, length) for old in self._lengths]
        del self._blocks[-(-max(self._lengths) // BLOCK) :]
        self._shared = min(self._shared, len(self._blocks))

    def prefix(self, length: int) -> "KeyValues":
        """Return a sequence with the first `length` tokens of this one. Full blocks are shared, the rest is copied."""
        other = KeyValues(self.shape)
        full, rest = divmod(length, BLOCK)
        other._blocks = self._blocks[:full]
        if rest:
            other._blocks.append(self._blocks[full].copy())
        other._lengths = [length] * self.shape.layers
        other._shared = full
        self._shared = max(self._shared, full)
        return other

    def _writable(self, index: int) -> Block:
        if index == len(self._blocks):
            self._blocks.append(Block.empty(self.shape))
        elif index < self._shared:  # after `truncate`
            self._blocks[index] = self._blocks[index].copy()
            self._shared = index
        return self._blocks[index]


def held_bytes(sequences: Iterable[KeyValues]) -> int:
    """Return the memory of these sequences, with each shared block counted once."""
    return sum({id(block): kv.shape.block_bytes for kv in sequences for block in kv._blocks}.values())
