"""`symbiosis-priv federation`: writes a federation file, and checks the providers that the file lists."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from symbiosis_priv.certificates.reading import Identity, Kind, fingerprint, load_certificates, require_identity
from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import federation_text, load_federation
from symbiosis_priv.limits import MAX_SECONDS, Role
from symbiosis_priv.system.interrupts import loading
from tenant.cli.options import Served, takes

if TYPE_CHECKING:  # importing torch would delay --help
    from symbiosis_priv.federation import Federation
    from tenant.preparation.prepared import Preparation

_EXAMPLE = "alpha.example:7401,keys/alpha.pem,Alpha GmbH"
app = typer.Typer(no_args_is_help=True, help="Write a federation file, and check the providers that it lists.")


@app.command()
@takes
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("federation.toml"),
    *,
    executor: Annotated[list[str], typer.Option(help='"ADDRESS,CERTIFICATE,OPERATOR" of an executor; repeatable.')],
    helper: Annotated[
        list[str] | None, typer.Option(help="The same of a helper, which has another operator; repeatable.")
    ] = None,
    pad_helpers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of helpers that share each pad; the others are spares. Default: all."),
    ] = None,
    tenant: Annotated[str, typer.Option(help="Your name, which is the name of certificate and key in --directory.")],
    directory: Annotated[Path, typer.Option("--directory", "-d", help="Folder of your keys.")] = Path("keys"),
    digest: Annotated[
        str | None,
        typer.Option(help="The model's digest, from an operator. Every session compares it with your own copy."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Your own copy of the checkpoint; digest and verification keys are made from it.")
    ] = None,
    served: Served,
) -> None:
    """Write federation.toml from the addresses and certificates that operators gave you; print each fingerprint."""
    if (digest is None) == (model is None):
        raise ConfigError("name the model: --digest sha256:... from an operator, or --model for your own checkpoint")
    certificate, key = directory / f"{tenant}.pem", directory / f"{tenant}.key"
    if not key.exists():
        raise ConfigError(f"{key} does not exist: make it with `symbiosis-priv keys request --name {tenant}`")
    providers = [_provider(text, "executor", path) for text in executor]
    providers += [_provider(text, "helper", path) for text in helper or ()]
    text = federation_text(
        providers,
        digest=digest or _digest(resolve(str(model)), served),
        certificate=_beside(path, certificate),
        key=_beside(path, key),
        weight_bits=served.weight_bits,
        scope=served.scope,
        pads=None if pad_helpers is None else {"helpers": pad_helpers},
    )
    for peer in _write(path, text).peers:
        typer.echo(f"{peer.role} {peer.name}: {fingerprint(peer.certificate)}")
    typer.echo(f"wrote {path}. Compare these fingerprints with their operators, then:")
    if not certificate.exists():
        typer.echo(f"  let the executor's operator sign {tenant}.csr")
        typer.echo(f"  put the {certificate.name} that you receive into {directory}")
    typer.echo(f"  symbiosis-priv federation check --federation {shlex.quote(str(path))}")


def _provider(text: str, role: Role, path: Path) -> dict[str, object]:
    """Parse `ADDRESS,CERTIFICATE,OPERATOR`. The operator may contain commas; the name is that of the certificate."""
    parts = [part.strip() for part in text.split(",", 2)]
    if len(parts) < 3 or not all(parts):
        raise ConfigError(f"--{role} {text!r}: write ADDRESS,CERTIFICATE,OPERATOR, such as {_EXAMPLE!r}")
    address, file, operator = parts
    given = {"name": Path(file).stem, "operator": operator, "role": role, "address": address}
    return {**given, "certificate": _beside(path, Path(file))}


def _beside(path: Path, file: Path) -> Path:
    """A file's path relative to the folder of the federation file."""
    return file if file.is_absolute() else Path(os.path.relpath(file, path.parent))


def _digest(folder: Path, served: Served) -> str:
    """Return the digest of a checkpoint. The same pass makes its verification keys, for `check` and for sessions."""
    with loading("torch"):
        from symbiosis_priv.checkpoints.weights import WeightStore
        from tenant.preparation.keys import prepare

    store = WeightStore(folder, weight_bits=served.weight_bits, scope=served.scope)
    with terminal.progress_bar("verification keys") as progress:
        return prepare(store, digest=None, progress=progress).manifest.digest


def _write(path: Path, text: str) -> Federation:
    """Write a new federation.toml and read it back. An invalid federation leaves no file."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        return load_federation(path)
    except FileExistsError:
        raise ConfigError(f"{path} exists and is not overwritten; choose another name") from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@app.command()
def check(
    *,
    federation: Annotated[Path, typer.Option("--federation", "-f", help="federation.toml")],
    model: Annotated[
        str | None, typer.Option(help="Your own full checkpoint, to check layers and products. Needed once per model.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=MAX_SECONDS, help="Seconds to wait for a provider.")] = 10.0,
) -> None:
    """Check every provider: certificate, role, digest, layers, products, clock and speed.

    The exit status is 1 if a provider fails, or if a layer or a helper is missing.
    """
    loaded = load_federation(federation)
    require_identity(Identity(loaded.tenant_certificate, loaded.tenant_key), kind=Kind.TENANT)
    if model is not None:
        resolve(model)
    with loading("torch"):
        from symbiosis_priv.arithmetic.ring import FORWARD
        from symbiosis_priv.checkpoints.layers import spans
        from tenant.federation.probe import find_gaps, probe_all
        from tenant.routing.discovery import DEADLINE_S, Discovered, Discovery

    preparation, found = _preparation(loaded, model), Discovered()
    if loaded.registries is not None:
        discovery = Discovery(loaded, deadline_s=min(timeout, DEADLINE_S))
        discovery.refresh()
        discovery.close(0.0)
        found = discovery.found
    with_found = replace(loaded, peers=(*loaded.peers, *found.executors))
    with terminal.working("asking the providers"):
        findings = probe_all(with_found, preparation, timeout=timeout)
    headings = ("provider", "role", "address", "layers", "certificate", "clock", "round trip", "throughput", "verdict")
    rows = []
    for finding in findings:
        peer, layers, throughput = finding.peer, "", ""
        groups = finding.groups.get(FORWARD, range(0))
        if preparation is not None and groups:
            layers = ", ".join(map(str, spans(preparation.manifest.layers[group] for group in groups)))
        if finding.rows_per_s is not None and finding.bytes_per_s is not None:
            throughput = f"{finding.rows_per_s:,.0f} rows/s, {finding.bytes_per_s / (1 << 20):,.1f} MiB/s"
        cells = (
            *(peer.name, peer.role, peer.where, layers),
            "" if finding.days_left is None else f"{math.floor(finding.days_left):,} days",
            "" if finding.clock_ahead_s is None else f"{round(finding.clock_ahead_s, 1) + 0.0:+.1f} s",
            "" if finding.round_trip_s is None else f"{1e3 * finding.round_trip_s:.2f} ms",
            throughput,
            "failed" if finding.failure else "ok",
        )
        rows.append(list(map(escape, cells)))
    table = terminal.table(headings, rows, styles=["red" if finding.failure else "" for finding in findings])
    terminal.console().print(table)
    ends = load_certificates(loaded.tenant_certificate)[0].not_valid_after_utc
    bits = f"{loaded.weight_bits} weight bits"
    terminal.say(f"model {loaded.model_digest}, {bits}; your own certificate ends on {ends:%Y-%m-%d}")
    warnings = [f"{finding.peer.name}: {warning}" for finding in findings for warning in finding.warnings]
    failures = list[str]()
    for finding in findings:
        if finding.failure:  # an executor from a registry may leave at any time
            of = warnings if finding.peer in found.executors else failures
            of.append(f"{finding.peer.name}: {finding.failure}")
    warnings += [f"{name}, from a registry, is not used: {why}" for name, why in found.refused.items()]
    for warning in warnings:
        terminal.say(warning, style="yellow")
    if preparation is None:
        terminal.say(
            "this machine has no verification keys of the model, so products and layers were not checked; add "
            "--model CHECKPOINT with your own full checkpoint"
        )
    else:
        failures += find_gaps(with_found, findings, preparation.manifest.layers)
    for failure in failures:
        terminal.say(failure, style="red")
    if failures:
        raise typer.Exit(1)
    terminal.say("every provider of the file shows its pinned certificate, accepts its role and serves the model")
    if preparation is not None:
        products = sum(finding.verified for finding in findings)
        terminal.say(f"every layer is served in both directions; {products} products match the pinned weights")


def _preparation(federation: Federation, model: str | None) -> Preparation | None:
    """Load the preparation of the pinned model, or make it from `model`; None if neither is possible."""
    from symbiosis_priv.checkpoints.weights import WeightStore
    from symbiosis_priv.errors import CheckpointError
    from tenant.preparation.keys import prepare

    store = None
    if model is not None:
        store = WeightStore(resolve(model), weight_bits=federation.weight_bits, scope=federation.scope)
    try:
        with terminal.progress_bar("verification keys") as progress:
            return prepare(
                store,
                digest=federation.model_digest,
                weight_bits=federation.weight_bits,
                progress=progress,
            )
    except CheckpointError:
        if model is not None:
            raise
        return None
