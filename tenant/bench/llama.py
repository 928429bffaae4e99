"""The measured Llamas: random weights, and a small vocabulary because the head stays with the tenant."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEAD = 64
"""Dimensions of an attention head; widths are multiples of it, unless `heads` is given."""


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The shape of a Llama.

    Args:
        width: columns of a hidden state.
        layers: blocks.
        inner: width inside the MLP.
        heads: query heads; `width / HEAD` if None.
        key_heads: key heads; one for four query heads if None.
        vocabulary: tokens.
    """

    width: int
    layers: int
    inner: int
    heads: int | None = None
    key_heads: int | None = None
    vocabulary: int = 4096

    def config(self) -> LlamaConfig:
        """The configuration, with tied embeddings."""
        heads = self.heads or max(1, self.width // HEAD)
        return LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=self.key_heads or max(1, heads // 4),
            vocab_size=self.vocabulary,
            tie_word_embeddings=True,
        )

    def save(self, folder: Path) -> Path:
        """Write a checkpoint with random weights, always the same, and return its folder."""
        torch.manual_seed(0)
        LlamaForCausalLM(self.config()).save_pretrained(folder)
        return folder


def small_llama(width: int, *, inner: int, layers: int = 1) -> Llama:
    """A Llama with four heads, for benchmarks that send requests to its layer groups without running the model."""
    return Llama(width=width, layers=layers, inner=inner, heads=4, key_heads=4, vocabulary=64)
