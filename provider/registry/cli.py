"""`symbiosis-priv registry`: serve, replicate, audit, show."""

from __future__ import annotations

import json
import signal
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from symbiosis_priv.display import terminal
from symbiosis_priv.errors import SymbiosisError, one_line

if TYPE_CHECKING:  # what imports torch is imported by the commands: not for --help
    from provider.registry.replica import Follower
    from provider.registry.server import RegistryServer

app = typer.Typer(no_args_is_help=True, help="Run and audit a registry, by which executors are found.")

Listen = Annotated[str, typer.Option(help="host:port; port 0 takes a free one.")]
Certificate = Annotated[
    Path, typer.Option(help="The registry's own, issued by the federation's authority; the name in it is its name.")
]
Key = Annotated[Path, typer.Option(help="Its private key.")]
Authority = Annotated[Path, typer.Option(help="The federation's: it vouches for executors and registries.")]
Revoked = Annotated[Path | None, typer.Option(help="What `symbiosis-priv keys revoke` writes.")]
Database = Annotated[Path, typer.Option(help="Where the log is kept.")]
MaxLog = Annotated[int, typer.Option(min=1, help="MiB that the log may take.")]
ReadyFile = Annotated[Path | None, typer.Option(help="Write the bound address here once ready (for port 0).")]
Lifeline = Annotated[bool, typer.Option("--lifeline", help="Also stop when stdin closes.")]

_LISTEN = "127.0.0.1:7500"
_DATABASE = Path("registry.sqlite")
_MAX_LOG_MIB = 8192


@app.command()
def serve(
    *,
    certificate: Certificate,
    key: Key,
    authority: Authority,
    revoked: Revoked = None,
    listen: Listen = _LISTEN,
    database: Database = _DATABASE,
    max_log_mib: MaxLog = _MAX_LOG_MIB,
    ready_file: ReadyFile = None,
    lifeline: Lifeline = False,
) -> None:
    """Take announcements and answer until SIGTERM or Ctrl-C."""
    from provider.registry.config import RegistryConfig
    from provider.registry.server import RegistryServer

    config = RegistryConfig(
        listen=listen,
        certificate=certificate,
        key=key,
        authority=authority,
        revoked=revoked,
        database=database,
        max_log_mib=max_log_mib,
    )
    _run(RegistryServer(config), ready_file=ready_file, lifeline=lifeline)


@app.command()
def replicate(
    source: Annotated[str, typer.Argument(help="host:port of the registry, or of another replica of it.")],
    *,
    of: Annotated[str, typer.Option(help="The registry's name, as in its certificate.")],
    certificate: Certificate,
    key: Key,
    authority: Authority,
    revoked: Revoked = None,
    listen: Listen = _LISTEN,
    database: Database = _DATABASE,
    max_log_mib: MaxLog = _MAX_LOG_MIB,
    ready_file: ReadyFile = None,
    lifeline: Lifeline = False,
) -> None:
    """Follow a registry's log and pass it on until SIGTERM or Ctrl-C; what contradicts it is reported, not followed."""
    from provider.registry.config import RegistryConfig
    from provider.registry.replica import Follower
    from provider.registry.server import RegistryServer

    config = RegistryConfig(
        listen=listen,
        certificate=certificate,
        key=key,
        authority=authority,
        revoked=revoked,
        database=database,
        max_log_mib=max_log_mib,
    )
    server = RegistryServer(config, replica_of=of)
    follower = Follower(server.log, source=source, trust=lambda: server.trust)
    _run(server, follower, ready_file=ready_file, lifeline=lifeline)


@app.command()
def audit(
    addresses: Annotated[list[str], typer.Argument(help="host:port of registries and replicas.")],
    *,
    authority: Authority,
    revoked: Revoked = None,
) -> None:
    """Check all of their logs, and compare them. Status 1 if one is broken, or a registry contradicts itself."""
    from provider.registry.audit import View, contradictions, differences, view
    from symbiosis_priv.registry.statements import Trust

    trust = Trust.load(authority, revoked)
    views: list[View] = []
    failures = []
    for address in addresses:
        try:
            found = view(address, trust)
        except SymbiosisError as error:
            failures.append(one_line(f"{address}: {error}"))
            continue
        views.append(found)
        kept = f"{min(found.hashes) + 1} to {max(found.hashes)}" if len(found.hashes) > 1 else "none"
        head = found.head.said
        terminal.say(
            f"{address}: log of {found.name}, entries {kept}, head {head.entries} {head.hash.hex()[:16]} of "
            f"{_time(head.issued)}: chain and signatures are good"
        )
    failures += contradictions(views)
    for difference in differences(views, now=time.time()):
        terminal.say(difference, style="yellow")
    for failure in failures:
        terminal.say(failure, style="red")
    if failures:
        raise typer.Exit(1)


@app.command()
def show(
    address: Annotated[str, typer.Argument(help="host:port of a registry or a replica.")],
    *,
    authority: Authority,
    revoked: Revoked = None,
) -> None:
    """Show who is listed, as their own signatures say."""
    from provider.registry.audit import view
    from symbiosis_priv.registry.statements import MS, Trust

    found = view(address, Trust.load(authority, revoked))
    headings = ("executor", "operator", "address", "model", "layers", "capacity", "until", "state")
    rows = []
    for announced in sorted(found.executors.values(), key=lambda one: (one.said.model_digest, one.said.layers)):
        said = announced.said
        state = "expired" if said.expires < MS * time.time() else "leaving" if said.draining else "serving"
        cells = (announced.name, announced.operator, said.address, said.model_digest[:19], str(said.layers))
        shown = [escape(one_line(cell)) for cell in cells]
        rows.append([*shown, f"{said.capacity:g}", _time(said.expires), state])
    terminal.console().print(terminal.table(headings, rows))


def _run(server: RegistryServer, follower: Follower | None = None, *, ready_file: Path | None, lifeline: bool) -> None:
    from provider import logs
    from symbiosis_priv.system.files import write_atomically
    from symbiosis_priv.system.parent_watch import when_stdin_closes

    logs.setup("info")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with server:
        if follower is not None:
            follower.start()
        if ready_file is not None:
            write_atomically(ready_file, server.address.encode())
        print(json.dumps({"event": "listening", "address": server.address, "registry": server.name}), flush=True)
        if lifeline:
            when_stdin_closes(stop.set)
        try:
            stop.wait()
        finally:
            if follower is not None:
                follower.stop()


def _time(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
