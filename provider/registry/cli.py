"""`symbiosis-priv registry`: serve, show."""

import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from provider.registry import RegistryConfig
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import one_line

app = typer.Typer(no_args_is_help=True, help="Run a registry, which lists executors to tenants, or show its list.")

Authority = Annotated[Path, typer.Option(help="CA certificate of the federation, for executors and registries.")]
Revoked = Annotated[Path | None, typer.Option(help="List that `symbiosis-priv keys revoke` writes.")]

_DEADLINE_S = 10.0


@app.command()
def serve(
    *,
    certificate: Annotated[
        Path, typer.Option(help="The registry's certificate, issued by the federation's authority.")
    ],
    key: Annotated[Path, typer.Option(help="Private key of the certificate.")],
    authority: Authority,
    revoked: Revoked = None,
    listen: Annotated[str, typer.Option(help="host:port; port 0 takes a free one.")] = RegistryConfig.listen,
    ready_file: Annotated[Path | None, typer.Option(help="Write the bound address here once ready.")] = None,
    stop_with_stdin: Annotated[bool, typer.Option("--stop-with-stdin", help="Also stop when stdin closes.")] = False,
) -> None:
    """Store executors' announcements and list them to tenants, until SIGTERM or Ctrl-C."""
    from provider import logs
    from provider.registry.server import RegistryServer
    from symbiosis_priv.system.files import write_atomically
    from symbiosis_priv.system.interrupts import set_on_signals
    from symbiosis_priv.system.processes import when_stdin_closes

    config = RegistryConfig(certificate=certificate, key=key, authority=authority, revoked=revoked, listen=listen)
    logs.setup("info")
    stop = threading.Event()
    set_on_signals(stop)
    with RegistryServer(config) as server:
        if ready_file is not None:
            write_atomically(ready_file, server.address.encode())
        logs.announce("listening", address=server.address)
        if stop_with_stdin:
            when_stdin_closes(stop.set)
        stop.wait()


@app.command()
def show(
    address: Annotated[str, typer.Argument(help="host:port of a registry.")],
    *,
    authority: Authority,
    revoked: Revoked = None,
) -> None:
    """Show the executors that a registry lists, as tenants see them: every signature is checked."""
    from symbiosis_priv.registry.descriptor import MS, Trust, verify_all
    from symbiosis_priv.registry.protocol import RegistryClient

    trust = Trust.load(authority, revoked)
    with RegistryClient(address, trust, deadline_s=_DEADLINE_S) as registry:
        listed = registry.list()
    found, refused = verify_all(listed, trust, now=time.time())
    headings = ("executor", "operator", "address", "model", "layers", "until", "state")
    rows = []
    for one in sorted(found, key=lambda one: (one.descriptor.model_digest, one.descriptor.layers)):
        described = one.descriptor
        cells = (one.name, one.operator, described.address, described.model_digest[:19], str(described.layers))
        until = f"{datetime.fromtimestamp(described.expires / MS, UTC):%Y-%m-%d %H:%M:%S} UTC"
        state = "leaving" if described.draining else "serving"
        rows.append([*(escape(one_line(cell)) for cell in cells), until, state])
    if rows:
        terminal.console().print(terminal.table(headings, rows))
    else:
        terminal.say("no executor is listed that a tenant would use")
    for why, count in refused.items():
        terminal.say(f"{count} of {len(listed)} descriptors are refused: {why}", style="yellow")
