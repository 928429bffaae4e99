"""`symbiosis-priv cache`: shows and clears the cache, which holds quantised weights and a tenant's secret keys."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from symbiosis_priv.display import terminal
from symbiosis_priv.system.files import default_cache, storing

app = typer.Typer(no_args_is_help=True, help="Show or clear this machine's cache of quantised weights and secret keys.")

_PARTS = {
    "weights": "quantised weights of public models, made again when needed",
    "tenant": "verification keys, SECRET, made again from the full checkpoint (`tenant prepare`)",
    "demo": "models of the demos, made or fetched again",
}


@app.command()
def show() -> None:
    """Show the cache's folder, and the size of each part."""
    terminal.say(f"{default_cache()} (SYMBIOSIS_PRIV_CACHE moves it)")
    for path in _parts():
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
        terminal.say(f"  {path.name:<8} {size / 2**20:>10,.1f} MiB  {_PARTS[path.name]}")


@app.command()
def clear(
    *,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask. End this machine's tenants and providers first.")
    ] = False,
) -> None:
    """Remove the cache, secret keys included; other files in its folder stay.

    A tenant with a slim checkpoint cannot make its keys again without the full checkpoint.
    """
    show()
    parts = _parts()
    if parts and (yes or typer.confirm("Remove all of it?")):
        for path in parts:
            with storing(path):
                shutil.rmtree(path)
        terminal.say("removed")


def _parts() -> list[Path]:
    return [path for name in _PARTS if (path := default_cache() / name).is_dir()]
