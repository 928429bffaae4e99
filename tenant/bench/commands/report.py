"""`bench report`: what --json has written, as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    files: Annotated[list[Path], typer.Argument(help="What --json has written.")],
    *,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the tables between this document's markers; else to stdout.")
    ] = None,
) -> None:
    """Turn --json files into tables, such as those of docs/benchmarks.md."""
    from tenant.bench.markdown import render, update
    from tenant.bench.report import read

    reports = [read(file) for file in files]
    if markdown is None:
        typer.echo("\n".join(map(render, reports)), nl=False)
    else:
        update(markdown, reports)
