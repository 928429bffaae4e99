"""The shapes of the measured models, which have random weights, and queued requests."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from symbiosis_priv.errors import ConfigError

if TYPE_CHECKING:  # importing torch would delay --help
    import torch
    from transformers import LlamaConfig

_VOCABULARY, _SMALL_VOCABULARY, _SMALL = 30522, 512, 512
HEAD = 64
"""Dimensions of an attention head; widths are multiples of it, unless `heads` is given."""


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The shape of a Llama. Raises `ConfigError` if the width is not a multiple of `HEAD` and `heads` is not given.

    Args:
        heads: number of query heads; `width / HEAD` if None.
        key_heads: number of key heads; a quarter of the query heads if None.
    """

    width: Annotated[int, Option(min=HEAD, help=f"Width of the Llama, a multiple of {HEAD}.")]
    layers: Annotated[int, Option(min=1, help="Layers of the Llama.")]
    inner: Annotated[int, Option(min=8, help="Width inside the MLP.")]
    heads: int | None = None
    key_heads: int | None = None
    vocabulary: int = 4096  # small, because the head stays with the tenant

    def __post_init__(self) -> None:
        if self.heads is None:
            check_width(self.width)

    def config(self) -> "LlamaConfig":
        """Return the configuration, with tied embeddings."""
        from transformers import LlamaConfig

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

    def save(self, folder: Path, *, dtype: "torch.dtype | None" = None, shard: str = "50GB") -> Path:
        """Write a checkpoint with random weights, always the same, and return its folder.

        Args:
            dtype: dtype of the weights; float32 if None.
            shard: largest size of one file, such as "50GB".
        """
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(self.config(), dtype=dtype or torch.float32)
        model.save_pretrained(folder, max_shard_size=shard)
        return folder


def small_llama(width: int, *, inner: int, layers: int = 1) -> Llama:
    """Return the shape of a Llama with four heads, for benchmarks that send requests to its layer groups without
    running it."""
    return Llama(width=width, layers=layers, inner=inner, heads=4, key_heads=4, vocabulary=64)


@dataclass(frozen=True, kw_only=True)
class Bert:
    """The shape of a BERT; BERT-base by default. Raises `ConfigError` if the width is not a multiple of `HEAD`."""

    width: Annotated[int, Option(min=HEAD, help=f"Width of the BERT, a multiple of {HEAD}.")] = 768
    layers: Annotated[int, Option(min=1, help="Layers of the BERT.")] = 12
    inner: Annotated[int, Option(min=8, help="Width inside the MLP.")] = 3072

    def __post_init__(self) -> None:
        check_width(self.width)

    def save(self, folder: Path) -> Path:
        """Write a checkpoint with random weights, always the same, and return its folder."""
        import torch
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            intermediate_size=self.inner,
            num_attention_heads=self.width // HEAD,
            vocab_size=_VOCABULARY if self.width > _SMALL else _SMALL_VOCABULARY,
        )
        BertModel(config).save_pretrained(folder)
        return folder


@dataclass(frozen=True, kw_only=True)
class QueuedRequests:
    """Queued requests, as in the PetS paper: lengths are normally distributed, tasks uniformly."""

    requests: Annotated[int, Option(min=1, help="Queued requests.")] = 256
    mean: Annotated[float, Option(min=1, help="Mean of their lengths, in tokens.")] = 32.0
    sigma: Annotated[float, Option(min=0, help="Standard deviation of their lengths, in tokens.")] = 8.0
    size: Annotated[int, Option(min=1, help="Requests in a batch of fixed size.")] = 32


def check_width(width: int) -> None:
    """Raise `ConfigError` unless a width is a multiple of `HEAD`."""
    if width % HEAD:
        raise ConfigError(f"--width {width}: write multiples of {HEAD}, the dimensions of an attention head")
