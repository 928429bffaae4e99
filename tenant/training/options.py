"""Options of fine-tuning and decoding, for Python callers and, with `tenant.cli.options.takes`, for the commands.

Each field with a `typer.Option` is an option of the command line with the same name; its `help` documents the field.
This module does not import torch.
"""

import importlib.util
from dataclasses import dataclass, field
from typing import Annotated

from typer import Option

from symbiosis_priv.errors import ConfigError

ALL_LINEAR = "all-linear"
DEFAULT_BETA = 0.1

Length = Annotated[int, Option(min=2, help="Tokens per block; longer examples are cut.")]
Seed = Annotated[int, Option(min=0, max=2**32 - 1, help="Seed of training or sampling. Masks do not depend on it.")]


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """How to fine-tune. `dtype` is the dtype of the tenant's own tensors; "auto" uses the checkpoint's dtype."""

    steps: Annotated[int | None, Option(min=1, help="Optimizer steps; instead of --epochs.")] = None
    epochs: Annotated[float, Option(min=0.0, max=1e6, help="Passes over the data.")] = 1.0
    rank: Annotated[int, Option(min=1, help="Rank of LoRA.")] = 8
    alpha: Annotated[
        int | None, Option(min=1, help="LoRA's product is scaled by alpha / rank. Default: twice the rank.")
    ] = None
    dropout: Annotated[float, Option(min=0.0, max=0.99, help="Share of LoRA's inputs that are zeroed at random.")] = 0.0
    target_modules: Annotated[
        str, Option(help="Linears that get LoRA, by name: q_proj,v_proj. all-linear: all but the LM head.")
    ] = ALL_LINEAR
    learning_rate: Annotated[float, Option(min=0.0, help="Learning rate of AdamW; decays linearly to 0.")] = 2e-4
    beta: Annotated[
        float | None,
        Option(min=0.0, help=f"Of preferences: the larger, the closer to the base model. Default: {DEFAULT_BETA}."),
    ] = None
    batch_size: Annotated[int, Option(min=1, help="Blocks or examples per forward pass.")] = 4
    sequence_length: Length = 256
    pad_to_multiple_of: Annotated[
        int, Option(min=1, help="Pad examples to a multiple of this number of tokens; providers see padded lengths.")
    ] = 1
    packing: Annotated[
        bool,
        Option("--packing", help="Put several chats in one row: fewer padded tokens, and providers see no lengths."),
    ] = False
    gradient_accumulation: Annotated[int, Option(min=1, help="Forward passes per step.")] = 1
    gradient_checkpointing: Annotated[
        bool, Option("--gradient-checkpointing", help="Recompute activations: less memory, more round trips.")
    ] = False
    seed: Seed = 0
    save_every: Annotated[int, Option(min=1, help="Steps between checkpoints.")] = 50
    resume: Annotated[bool, Option("--resume", help="Continue from the last checkpoint in --output.")] = False
    report_to: Annotated[
        list[str],
        Option(
            help="Experiment tracker: tensorboard, wandb, mlflow, ...; repeatable. A hosted tracker sees losses and "
            "options."
        ),
    ] = field(default_factory=list)
    dtype: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How to choose tokens: greedy by default, sampling with `temperature` or `top_p`, beam search with `beams`.
    Executors see the number of generated tokens, unless `fixed_length` is set."""

    max_new_tokens: Annotated[int, Option(min=1, help="Maximum number of new tokens.")] = 64
    fixed_length: Annotated[
        bool,
        Option("--fixed-length", help="Always generate --max-new-tokens: hides from providers where the text ends."),
    ] = False
    temperature: Annotated[float | None, Option(min=0.0, help="Sample at this temperature.")] = None
    top_p: Annotated[
        float | None, Option(min=0.0, max=1.0, help="Sample from the smallest set of tokens with this probability.")
    ] = None
    beams: Annotated[int, Option(min=1, help="Width of beam search.")] = 1
    seed: Seed = 0

    @property
    def samples(self) -> bool:
        return bool(self.temperature) or self.top_p is not None


def check_installed() -> None:
    """Refuse to fine-tune without the packages of the extra `finetune`. Raises `ConfigError`."""
    if importlib.util.find_spec("trl") is None:
        raise ConfigError("trl is not installed; run in the project's clone: pip install '.[finetune]'")
