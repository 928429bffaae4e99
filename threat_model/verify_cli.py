"""`symbiosis-priv verify`: tests live providers against every property of `threat_model.conformance`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from symbiosis_priv.certificates.reading import Identity, Kind, load_pin, require_identity
from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.layers import Scope
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import CheckpointError, ConfigError
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_SECONDS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS, Role
from symbiosis_priv.system.files import output_file, write_atomically
from symbiosis_priv.system.interrupts import loading
from tenant.cli.options import takes

# torch, Hypothesis and the tenant's packages are imported late, so that --help does not wait for them
if TYPE_CHECKING:
    from rich.console import Console

    from symbiosis_priv.federation import Peer
    from threat_model.conformance import Oracle, PropertyResult, Subject, Violation

_VALUES = 1000  # largest number of a counterexample's entries in the JSON file
_IDENTITY = "providers serve only tenants with a certificate (mutual TLS)"


@dataclass(frozen=True, kw_only=True)
class Single:
    """The provider to verify without a federation file."""

    address: Annotated[str | None, typer.Option(help="Verify one provider: HOST:PORT.")] = None
    certificate: Annotated[Path | None, typer.Option(help="With --address: its certificate, pinned.")] = None
    tenant_certificate: Annotated[
        Path | None,
        typer.Option(help="With --address: your certificate, issued by the provider's tenant authority (mutual TLS)."),
    ] = None
    tenant_key: Annotated[Path | None, typer.Option(help="With --address: its private key.")] = None
    role: Annotated[Role, typer.Option(help="With --address: the role to test.")] = "executor"
    weight_bits: Annotated[
        int, typer.Option(min=MIN_WEIGHT_BITS, max=MAX_WEIGHT_BITS, help="With --address: bits of a quantised weight.")
    ] = DEFAULT_WEIGHT_BITS
    tied_head: Annotated[
        bool, typer.Option("--tied-head", help="With --address: the provider serves a tied LM head.")
    ] = False
    no_experts: Annotated[
        bool, typer.Option("--no-experts", help="With --address: the provider serves no experts.")
    ] = False


_SINGLE = Single()


@takes
def verify(
    *,
    federation: Annotated[Path | None, typer.Option(help="Verify every provider of this federation.toml.")] = None,
    single: Single = _SINGLE,
    model: Annotated[
        str | None,
        typer.Option(
            help="Your own copy of the base checkpoint. Without it, the verification keys of an earlier session are "
            "used, and the float path is not tested."
        ),
    ] = None,
    floats: Annotated[
        bool, typer.Option("--float", help="Fail an executor that serves no floats (only paper-pool needs them).")
    ] = False,
    examples: Annotated[int, typer.Option(min=1, help="Random requests per property.")] = 40,
    seed: Annotated[int | None, typer.Option(min=0, help="Repeat the run that printed this seed.")] = None,
    deadline: Annotated[float, typer.Option(min=0.1, max=MAX_SECONDS, help="Seconds to wait for one answer.")] = 30.0,
    budget: Annotated[
        float, typer.Option(min=0.1, max=MAX_SECONDS, help="Seconds for all properties of one provider.")
    ] = 300.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=output_file, help="Write every outcome here.")
    ] = None,
) -> None:
    """Test live providers for exactness, property by property.

    Status 1 if a provider breaks a property, does not answer in time, or could not be tested at all. The provider is
    named with the property and the smallest request found. Only random test data is sent, never yours.
    """
    if federation is not None and single.address is not None:
        raise ConfigError("--federation and --address exclude each other: the file names the addresses")
    chosen = secrets.randbelow(2**32) if seed is None else seed
    subjects = (
        _federation(federation, model, floats=floats, seed=chosen, deadline=deadline)
        if federation is not None
        else _single(single, model, floats=floats, seed=chosen, deadline=deadline)
    )
    begun = time.monotonic()
    terminal.say(f"model {subjects[0].oracle.manifest.digest}")
    outcomes = _run(subjects, examples=examples, seed=chosen, budget=budget)
    passed = _passed(outcomes)
    total, seconds = sum(o.examples for o in outcomes), time.monotonic() - begun
    terminal.say(
        f"\n{total} examples in {seconds:.1f} s; --seed {chosen} repeats them. They show how these requests were "
        f"answered, not how later requests will be: every session verifies each of its own answers."
    )
    if json_file is not None:
        report = _report(outcomes, subjects, passed=passed, examples=examples, seed=chosen)
        write_atomically(json_file, report)
    raise typer.Exit(0 if passed else 1)


def _federation(path: Path, model: str | None, *, floats: bool, seed: int, deadline: float) -> list[Subject]:
    from symbiosis_priv.federation import load_federation

    federation = load_federation(path)
    require_identity(Identity(federation.tenant_certificate, federation.tenant_key), kind=Kind.TENANT)
    if model is not None:
        resolve(model)
    with loading("torch"):
        from threat_model.conformance import Dialler, Subject

    scope, digest = federation.scope, federation.model_digest
    oracle = _oracle(model, weight_bits=federation.weight_bits, scope=scope, digest=digest, seed=seed)

    def subject(peer: Peer, executors: Sequence[Subject] = ()) -> Subject:
        dialler = Dialler(
            peer, certificate=federation.tenant_certificate, key=federation.tenant_key, deadline_s=deadline
        )
        return Subject(dialler, oracle, executors, require_floats=floats)

    executors = [subject(peer) for peer in federation.executors]
    return executors + [subject(peer, executors) for peer in federation.helpers]


def _single(single: Single, model: str | None, *, floats: bool, seed: int, deadline: float) -> list[Subject]:
    from symbiosis_priv.federation import Peer
    from symbiosis_priv.network.addresses import parse_address

    if single.address is None:
        raise ConfigError("name the providers: --federation FILE, or --address HOST:PORT for one of them")
    if single.certificate is None or model is None:
        raise ConfigError(
            "--address needs --certificate PROVIDER.pem, and --model CHECKPOINT to compare its answers with"
        )
    if single.tenant_certificate is None or single.tenant_key is None:
        raise ConfigError(
            f"--address needs --tenant-certificate and --tenant-key: {_IDENTITY}. Make a request with `symbiosis-priv "
            f"keys request`, and ask the executor's operator to sign it"
        )
    host, port = parse_address(single.address)
    load_pin(single.certificate)
    require_identity(Identity(single.tenant_certificate, single.tenant_key), kind=Kind.TENANT)
    resolve(model)
    with loading("torch"):
        from threat_model.conformance import Dialler, Subject

    peer = Peer(
        name=single.address, operator="unknown", role=single.role, host=host, port=port, certificate=single.certificate
    )
    scope = Scope(tied_head=single.tied_head, experts=not single.no_experts)
    oracle = _oracle(model, weight_bits=single.weight_bits, scope=scope, digest=None, seed=seed)
    dialler = Dialler(peer, certificate=single.tenant_certificate, key=single.tenant_key, deadline_s=deadline)
    return [Subject(dialler, oracle, require_floats=floats)]


def _oracle(model: str | None, *, weight_bits: int, scope: Scope, digest: str | None, seed: int) -> Oracle:
    from symbiosis_priv.checkpoints.weights import WeightStore
    from tenant.core.blame import DEFAULT_COLUMNS
    from tenant.preparation.keys import prepare
    from threat_model.conformance import CheckpointOracle, PreparedOracle

    if model is None:
        assert digest is not None  # --address requires --model
        try:
            return PreparedOracle(prepare(None, digest=digest, columns=DEFAULT_COLUMNS))
        except CheckpointError as error:
            raise ConfigError(
                f"no session has prepared model {digest} on this machine: add --model CHECKPOINT, your own copy "
                f"of what the providers should serve"
            ) from error
    store = WeightStore(resolve(model), weight_bits=weight_bits, scope=scope)
    with terminal.progress_bar("quantising") as progress:
        own = store.manifest(progress=progress).digest
    if digest not in (None, own):
        raise CheckpointError(f"{model} is model {own}, but the federation pins {digest}: these cannot be compared")
    return CheckpointOracle(store, seed=seed)


def _run(subjects: Sequence[Subject], *, examples: int, seed: int, budget: float) -> list[PropertyResult]:
    """Run every property; each outcome is printed as soon as it is known."""
    from rich.progress import TimeElapsedColumn

    from threat_model.conformance import PROPERTIES, verify

    console = terminal.console()
    outcomes: list[PropertyResult] = []
    todo = [(s, p) for s in subjects for p in PROPERTIES if s.role in p.roles]
    with terminal.progress(TimeElapsedColumn(), of=console) as bar:
        task = bar.add_task("", total=len(todo))

        def tick() -> None:
            subject, chosen = todo[len(outcomes)]
            bar.update(task, description=f"{subject.name}: {chosen.name}")

        for outcome in verify(subjects, PROPERTIES, examples=examples, seed=seed, budget_s=budget, tick=tick):
            _show(console, outcome, outcomes)
            outcomes.append(outcome)
            bar.update(task, completed=len(outcomes))
    return outcomes


def _passed(outcomes: Sequence[PropertyResult]) -> bool:
    """Returns True if no property is broken or unanswered, and each provider holds at least one."""
    providers = {(o.provider, o.role) for o in outcomes}
    tested = {(o.provider, o.role) for o in outcomes if o.verdict == "holds"}
    return providers == tested and not any(o.verdict in ("broken", "no answer", "out of time") for o in outcomes)


_STYLE = {
    "holds": "green",
    "broken": "bold red",
    "no answer": "bold yellow",
    "out of time": "bold yellow",
    "not served": "dim",
    "not tested": "dim",
}


def _show(console: Console, outcome: PropertyResult, before: Sequence[PropertyResult]) -> None:
    """Print one outcome; a provider's name, and the reason why properties were not judged, are printed once."""

    def say(text: str, style: str | None = None) -> None:
        console.print(_printable(text), style=style, markup=False, highlight=False, soft_wrap=True)

    own = [o for o in before if (o.provider, o.role) == (outcome.provider, outcome.role)]
    if not own:
        console.print()
        say(f"{outcome.provider} ({outcome.role})", "bold")
    style, count = _STYLE[outcome.verdict], outcome.examples or ""
    say(f"  {outcome.verdict:<11} {outcome.property.name:<16} {count:>5}  {outcome.property.claim}", style)
    if outcome.reason is not None and outcome.reason not in {o.reason for o in own}:
        say(f"    {outcome.reason}", style)
    if outcome.violation is not None:
        culprit = outcome.culprit or f"{outcome.provider} or an executor"
        say(f"    {culprit} breaks {outcome.property.name}", style)
        for line in outcome.violation.lines():
            say(f"      {line}")


def _printable(text: str) -> str:
    """`text` without control characters: a provider may have chosen part of it."""
    return "".join(char if char.isprintable() else " " for char in text)


def _report(
    outcomes: Sequence[PropertyResult], subjects: Sequence[Subject], *, passed: bool, examples: int, seed: int
) -> bytes:
    import msgspec

    document = {
        "passed": passed,
        "model_digest": subjects[0].oracle.manifest.digest,
        "weight_bits": subjects[0].oracle.manifest.weight_bits,
        "seed": seed,
        "examples": examples,
        "outcomes": [
            {
                "provider": o.provider,
                "role": o.role,
                "property": o.property.name,
                "claim": o.property.claim,
                "verdict": o.verdict,
                "examples": o.examples,
                "seconds": round(o.seconds, 3),
                "reason": o.reason,
                "culprit": o.culprit,
                "counterexample": None if o.violation is None else _counterexample(o.violation),
            }
            for o in outcomes
        ],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _counterexample(violation: Violation) -> dict[str, Any]:
    """The smallest failing request; `nonzero` lists `[row, column, value]`."""
    import msgspec

    out: dict[str, Any] = {"what": violation.what, "group": violation.group}
    if violation.case is not None:
        case = violation.case
        where = case.rows.nonzero()[:_VALUES].tolist()
        out |= {
            "direction": case.direction,
            "arithmetic": case.arithmetic,
            "rows": len(case.rows),
            "width": case.rows.shape[1],
            "nonzero": [[row, column, case.rows[row, column].item()] for row, column in where],
        }
        if case.seed:
            out |= {"seed": case.seed.hex(), "first_row": case.first_row}
    if violation.difference is not None:
        out["difference"] = msgspec.to_builtins(violation.difference)
    return out
