"""`tenant merge`: a plain checkpoint with an adapter merged into it."""

from pathlib import Path
from typing import Annotated

import typer

from symbiosis_priv.checkpoints.checkpoint import resolve_adapter
from symbiosis_priv.display import terminal
from symbiosis_priv.system.files import check_unused
from tenant.cli.options import loading


def merge(
    *,
    model: Annotated[str, typer.Option("--model", "-m", help="The full public checkpoint.")],
    adapter: Annotated[str, typer.Option("--adapter", "-a", help="A PEFT folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder for the merged checkpoint.")],
) -> None:
    """Merge an adapter into the public checkpoint on this machine, and write a plain checkpoint. Needs no provider."""
    folder = resolve_adapter(adapter)
    check_unused(output)
    with loading():
        from tenant.training.merge import merge as write_merged

    with terminal.progress_bar("tensors") as progress:
        layers = write_merged(model, folder, output, progress=progress)
    typer.echo(f"merged {layers} layers into {output}, which loads wherever the base model does")
    typer.echo(
        "The adapter was trained beside weights of the federation's weight bits, and these are the public ones: the "
        "merged model differs from the split one as the plain model does (`tenant check --text` measures it)."
    )
