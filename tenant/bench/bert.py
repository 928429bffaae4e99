"""The shape of the measured BERT, and requests that wait for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from tenant.bench.llama import HEAD, check_width

_VOCABULARY, _SMALL_VOCABULARY, _SMALL = 30522, 512, 512


@dataclass(frozen=True, kw_only=True)
class Bert:
    """The shape of a BERT; BERT-base by default. ConfigError if the width is not a multiple of HEAD."""

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
class Traffic:
    """Requests that wait, as in the PetS paper: their lengths follow a normal distribution, their tasks a uniform
    one."""

    requests: Annotated[int, Option(min=1, help="Queued requests.")] = 256
    mean: Annotated[float, Option(min=1, help="Mean of their lengths, in tokens.")] = 32.0
    sigma: Annotated[float, Option(min=0, help="Standard deviation of their lengths, in tokens.")] = 8.0
    size: Annotated[int, Option(min=1, help="Requests in a batch of fixed size.")] = 32
