"""`symbiosis-priv federation`: check the providers that a federation file names."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from symbiosis_priv import wire
from symbiosis_priv.errors import SymbiosisError, one_line
from symbiosis_priv.federation import Federation, Peer, load_federation
from symbiosis_priv.keystream import SEED_BYTES
from symbiosis_priv.ring import FORWARD
from tenant.channel import Channel, fresh_nonce

app = typer.Typer(no_args_is_help=True, help="Check the providers that a federation file names.")

_ROUND_TRIPS = 20


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
    loaded = load_federation(federation)
    table = Table("provider", "role", "address", "round trip", "verdict")
    failures = []
    for peer in loaded.peers:
        cells = [escape(cell) for cell in (peer.name, peer.role, f"{peer.host}:{peer.port}")]
        try:
            seconds = _probe(peer, loaded, timeout=timeout)
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


def _probe(peer: Peer, federation: Federation, *, timeout: float) -> float:
    """A provider's median round trip in seconds, once the channel has checked pin, role and digest."""
    channel = Channel(
        peer,
        certificate=federation.tenant_certificate,
        key=federation.tenant_key,
        model_digest=federation.model_digest,
        deadline_s=timeout,
    )
    try:
        channel.welcome()
        ask = _empty_execute if peer.role == "executor" else _empty_effect
        return statistics.median(_seconds(ask, channel) for _ in range(_ROUND_TRIPS))
    finally:
        channel.close()


def _empty_execute(channel: Channel) -> None:
    request = wire.Execute(nonce=fresh_nonce(), group=0, direction=FORWARD, arithmetic="ring", rows=0)
    channel.request(request, torch.empty((0, 1), dtype=torch.int32), outputs=1)


def _empty_effect(channel: Channel) -> None:
    seed = secrets.token_bytes(SEED_BYTES)
    request = wire.Effect(
        nonce=fresh_nonce(), group=0, direction=FORWARD, arithmetic="ring", rows=0, seed=seed, first_row=0
    )
    channel.request(request, None, outputs=1)


def _seconds(ask: Callable[[Channel], None], channel: Channel) -> float:
    start = time.perf_counter()
    ask(channel)
    return time.perf_counter() - start
