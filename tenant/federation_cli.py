"""`symbiosis-priv federation`: check the providers that a federation file names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from symbiosis_priv.errors import SymbiosisError, one_line

app = typer.Typer(no_args_is_help=True, help="Check the providers that a federation file names.")


@app.callback()
def _group() -> None:
    """Keeps `check` a command of its own, also while it is the only one."""


@app.command()
def check(
    *,
    federation: Annotated[Path, typer.Option("--federation", "-f", help="federation.toml")],
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for each provider.")] = 10.0,
) -> None:
    """Connect to every provider: pinned certificate, role, model digest, round-trip time. Status 1 if one fails."""
    # torch: not for --help
    from symbiosis_priv.federation import load_federation
    from tenant.probe import probe

    loaded = load_federation(federation)
    table = Table("provider", "role", "address", "round trip", "verdict")
    failures = []
    for peer in loaded.peers:
        cells = [escape(cell) for cell in (peer.name, peer.role, f"{peer.host}:{peer.port}")]
        try:
            seconds = probe(peer, loaded, timeout=timeout)
        except SymbiosisError as error:
            failures.append(one_line(f"{peer.name}: {error}"))
            table.add_row(*cells, "", "[red]failed[/red]")
        else:
            table.add_row(*cells, f"{1e3 * seconds:.2f} ms", "[green]ok[/green]")
    console = Console()
    console.print(table)
    console.print(f"model {loaded.model_digest}, {loaded.weight_bits} weight bits", soft_wrap=True)
    for failure in failures:
        console.print(escape(failure), style="red", soft_wrap=True)
    if failures:
        raise typer.Exit(1)
    console.print("every provider showed its pinned certificate, accepts its role, serves the model")
