"""`symbiosis-priv provider`: serve, usage, top, manifest, init."""

import os
import shlex
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from symbiosis_priv.display import terminal
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.limits import MAX_SECONDS, Role
from symbiosis_priv.network.addresses import local_address, parse_address
from symbiosis_priv.system.interrupts import importing, loading
from symbiosis_priv.system.processes import end_now

app = typer.Typer(no_args_is_help=True, help="Serve the frozen layers of a public model.")

Config = Annotated[Path, typer.Option("--config", "-c", help="provider.toml")]


@app.command()
def serve(
    *,
    config: Config,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write the bound address here once ready (for port 0).")
    ] = None,
    stop_with_stdin: Annotated[bool, typer.Option("--stop-with-stdin", help="Also stop when stdin closes.")] = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C. When ready, print one line of JSON to stdout; logs go to stderr."""
    from provider import logs
    from provider.config.provider_toml import load

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it means to read files again, and they are read later
    settings = load(config)
    logs.setup(settings.log_level)
    log = logs.EventLog("provider")

    def tell(progress: str) -> None:
        log.info("starting", provider=settings.name, progress=progress)

    with terminal.progress_bar("quantising", tell=tell) as progress, ExitStack() as starting:
        starting.enter_context(terminal.working("starting", tell=tell))
        with importing():
            from provider import serve as server
            from provider.processes import cards
        run = cards.serve if settings.executor.per_card else server.serve
        run(
            settings,
            source=config,
            ready_file=ready_file,
            stop_with_stdin=stop_with_stdin,
            progress=progress,
            on_ready=starting.close,
        )
    end_now()


@app.command()
def manifest(*, config: Config) -> None:
    """Print the digest to pin in federation.toml. The layer groups are listed on stderr."""
    from provider.config.provider_toml import load

    settings = load(config)
    with loading("torch"):
        from provider.products.model import open_store
    with terminal.progress_bar("quantising") as progress:
        found = open_store(settings.before_layers_are_chosen()).manifest(progress=progress)
    table = Table("layer", "layer group", "inputs", "outputs", title=f"{found.weight_bits} weight bits")
    for layer, group in zip(found.layers, found.groups, strict=True):
        table.add_row(str(layer), " ".join(group.members), str(group.inputs), " + ".join(map(str, group.outputs)))
    terminal.console(stderr=True).print(table)
    typer.echo(found.digest)


@app.command()
def usage(*, config: Config) -> None:
    """Print what each tenant has used, per day and role, as JSON; the provider may be running."""
    from provider.config.provider_toml import load
    from provider.gateway.usage import read

    database = load(config).usage.database
    assert database is not None, "load() sets it"

    typer.echo(msgspec.json.format(msgspec.json.encode(list(read(database)))).decode())


@app.command()
def top(
    *,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="provider.toml of the provider.")] = None,
    address: Annotated[
        str | None, typer.Option(help=r"\[metrics] listen of the provider, instead of --config.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, max=MAX_SECONDS, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one update and end.")] = False,
) -> None:
    """Show a running provider, live: tenants, queue, batches, rows per second, busiest layers. Ctrl-C ends it."""
    from provider.config.provider_toml import load
    from provider.operations.top import watch

    if address is None:
        if config is None:
            raise ConfigError("name the provider: --config provider.toml, or --address with its [metrics] listen")
        address = load(config).metrics.listen
    if address is None:
        raise ConfigError(
            f'{config} has no address for operators: add listen = "127.0.0.1:9464" under [metrics], and restart the '
            f"provider"
        )
    watch(local_address(address), interval=interval, once=once)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("provider.toml"),
    *,
    name: Annotated[str, typer.Option("--name", "-n", help="Name of the provider, and of its key file.")] = "alpha",
    role: Annotated[Role, typer.Option(help="An executor sees masked rows, a helper a seed.")] = "executor",
    checkpoint: Annotated[str, typer.Option(help="Checkpoint folder or hub name.")] = "model",
    layers: Annotated[
        str | None, typer.Option(help="First and last layer to serve, as in 0-15. Default: all layers.")
    ] = None,
    listen: Annotated[str, typer.Option(help="host:port; port 0 takes a free one.")] = "127.0.0.1:7401",
    public_address: Annotated[
        str | None, typer.Option(help="host:port by which tenants reach it, behind NAT or a forwarder.")
    ] = None,
) -> None:
    """Write a commented provider.toml, and print the settings that are still missing."""
    from provider.config.provider_toml import template

    host = "YOUR.HOST" if public_address is None else parse_address(public_address)[0]
    if Path(checkpoint).is_dir() and not Path(checkpoint).is_absolute():
        checkpoint = os.path.relpath(checkpoint, path.parent)
    revoked = "keys/revoked.txt" if (path.parent / "keys/revoked.txt").exists() else None
    text = template(
        name=name,
        roles=[role],
        checkpoint=checkpoint,
        layers=layers,
        listen=listen,
        public_address=public_address,
        revoked=revoked,
    )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists and is not overwritten; choose another name") from None
    keys, steps = path.parent / "keys", []
    where = "" if keys == Path("keys") else f" --directory {shlex.quote(str(keys))}"
    if not (keys / "authority.pem").exists():
        put = f"put authority.pem and revoked.txt, which the executor's operator has, into {keys}"
        steps.append(f"symbiosis-priv keys authority{where}" if role == "executor" else put)
    if not (keys / f"{name}.pem").exists():
        steps.append(f"symbiosis-priv keys provider --name {name} --host {host}{where}")
    steps += [
        f"symbiosis-priv provider {command} --config {shlex.quote(str(path))}" for command in ("manifest", "serve")
    ]
    typer.echo("\n  ".join([f"wrote {path}. Next:", *steps]))
