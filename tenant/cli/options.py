"""Options that several commands have in common, and what each of them does first and last."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from symbiosis_priv.system.files import output_file

if TYPE_CHECKING:  # imports torch: not for --help
    from tenant.model.hf import RemoteConfig

Model = Annotated[str, typer.Option("--model", "-m", help="Checkpoint folder, or a name on the Hugging Face hub.")]
Federation = Annotated[Path, typer.Option("--federation", "-f", help="federation.toml")]
Masking = Annotated[str, typer.Option(help="pad, local, none, paper-pool, simulate: who can read your rows.")]
Full = Annotated[
    Path | None, typer.Option("--checkpoint", help="The full checkpoint, if --model holds only your own tensors.")
]
Deadline = Annotated[float, typer.Option(help="Seconds that one request may take, a provider's restart included.")]
Status = Annotated[
    Path | None,
    typer.Option(
        callback=output_file, help="Keep how each provider is doing in this file, for `federation top --status`."
    ),
]
Text = Annotated[
    Path,
    typer.Option(
        "--text",
        "--data",
        "-t",
        help="Plain text: documents between blank lines, or one a line. Or FILE.jsonl, whose lines all hold text, "
        "prompt and completion, or messages (a chat).",
    ),
]
Length = Annotated[int, typer.Option(min=2, help="Tokens per block.")]
Seed = Annotated[
    int, typer.Option(min=0, max=2**32 - 1, help="Of what is random in training or sampling; never of a mask.")
]


def remote_config(
    federation: Path, masking: str, *, deadline_s: float, checkpoint: Path | None, status: Path | None
) -> RemoteConfig:
    """What a command's options say about providers and masking."""
    from tenant.model.hf import RemoteConfig

    return RemoteConfig(
        federation=federation,
        masking=masking,
        deadline_s=deadline_s,
        checkpoint=checkpoint,
        status=status,
        surface="command line",
    )


def quiet() -> None:
    """Nobody but the command itself reports progress and warnings."""
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # peft 0.21 uses an old name
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def table_of(title: str, *columns: str) -> Table:
    """A table of figures, without rows."""
    table = Table(title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table
