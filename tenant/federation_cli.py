"""`symbiosis-priv federation`: write a federation file, and check the providers that it names."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from symbiosis_priv.certificates import fingerprint
from symbiosis_priv.errors import ConfigError, SymbiosisError, one_line
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS

app = typer.Typer(no_args_is_help=True, help="Write a federation file, and check the providers that it names.")


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("federation.toml"),
    *,
    executor: Annotated[
        list[str], typer.Option(help='"ADDRESS,CERTIFICATE,OPERATOR" of who sees masked rows; repeatable.')
    ],
    helper: Annotated[
        list[str] | None, typer.Option(help="The same of who sees a seed: another operator; repeatable.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Your name: of the certificate and the key in --directory.")],
    directory: Annotated[Path, typer.Option("--directory", "-d", help="Where your keys are.")] = Path("keys"),
    digest: Annotated[
        str | None,
        typer.Option(help="Of the model, as an operator gave it; compared with your own copy in every session."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Your own copy of the checkpoint, to compute the digest from.")
    ] = None,
    weight_bits: Annotated[
        int, typer.Option(min=MIN_WEIGHT_BITS, max=MAX_WEIGHT_BITS, help="Bits of a quantised weight.")
    ] = DEFAULT_WEIGHT_BITS,
) -> None:
    """Write federation.toml from what the providers' operators have handed out; shows each pinned fingerprint."""
    from tenant.federation_init import Descriptor, write_federation

    if (digest is None) == (model is None):
        raise ConfigError("name the model: --digest sha256:... from an operator, or --model for your own checkpoint")
    certificate, key = directory / f"{tenant}.pem", directory / f"{tenant}.key"
    if not key.exists():
        raise ConfigError(f"{key} does not exist: make it with `symbiosis-priv keys request --name {tenant}`")
    descriptors = [Descriptor.parse(text, role="executor") for text in executor]
    descriptors += [Descriptor.parse(text, role="helper") for text in helper or ()]
    federation = write_federation(
        path,
        descriptors,
        digest=digest or _digest(str(model), weight_bits),
        weight_bits=weight_bits,
        tenant_certificate=certificate,
        tenant_key=key,
    )
    for peer in federation.peers:
        typer.echo(f"{peer.role} {peer.name}: {fingerprint(peer.certificate)}")
    typer.echo(f"wrote {path}. Compare these fingerprints with their operators, then:")
    if not certificate.exists():
        typer.echo(f"  put {certificate.name}, which the executor's operator signs, into {directory}")
    typer.echo(f"  symbiosis-priv federation check --federation {shlex.quote(str(path))}")


def _digest(model: str, weight_bits: int) -> str:
    # torch: not for --help
    from symbiosis_priv.checkpoint import resolve
    from symbiosis_priv.weights import WeightStore
    from tenant.connect import progress_bar

    store = WeightStore(resolve(model), weight_bits=weight_bits)
    with progress_bar("quantising") as progress:
        return store.assemble([entry for entry, _ in store.stream(progress=progress)]).digest


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
