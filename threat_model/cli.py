"""`symbiosis-priv threat-model` runs all attacks against this project; `symbiosis-priv verify` tests live providers
against every property of `threat_model.conformance`."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TimeElapsedColumn

from symbiosis_priv.certificates.reading import Identity, Kind, require_identity
from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.limits import MAX_SECONDS
from symbiosis_priv.system import interrupts
from symbiosis_priv.system.files import output_file, write_atomically
from tenant.cli.options import loading

# torch, Hypothesis and the packages that need them are imported late, so that --help does not wait for them
if TYPE_CHECKING:
    from threat_model.conformance.subject import Subject
    from threat_model.conformance.trials import PropertyResult


def threat_model(
    *,
    html: Annotated[
        Path | None, typer.Option("--html", callback=output_file, help="Write one page with tables and bars here.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer schemes and rows; about two minutes.")] = False,
) -> None:
    """Attack every masking scheme on a real run and report what leaks. Status 1 if a verdict is not as promised."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # after the environment is set; torch is imported here, so that --help does not wait for it
    with loading():
        import torch

        from threat_model.lab import Lab
        from threat_model.report import show, to_html
        from threat_model.suite import run_suite

    shown = terminal.console(stderr=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        terminal.progress(TimeElapsedColumn(), of=shown) as bar,
        nullcontext() if shown.is_terminal else terminal.working("attacking every scheme"),
        ExitStack() as undo,
    ):
        task = bar.add_task("base model, certificates, providers", total=None)

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # matrices are small here, and more threads would mostly wait for each other
        suite = run_suite(undo.enter_context(Lab(Path(folder))), quick=quick, on_progress=update)
    console = terminal.console()
    show(suite, console)
    if html is not None:
        write_atomically(html, to_html(suite).encode())
    if suite.unexpected:
        console.print("Not as promised: " + "; ".join(suite.unexpected), style="bold red")
        raise typer.Exit(1)
    console.print(f"Every verdict is the promised one ({suite.seconds:.0f} s).", style="green")


def verify(
    *,
    federation: Annotated[Path, typer.Option("--federation", "-f", help="Verify every provider of this file.")],
    model: Annotated[str, typer.Option(help="Your own copy of the base checkpoint.")],
    examples: Annotated[int, typer.Option(min=1, help="Random requests per property.")] = 40,
    seed: Annotated[int | None, typer.Option(min=0, help="Repeat the run that printed this seed.")] = None,
    deadline: Annotated[float, typer.Option(min=0.1, max=MAX_SECONDS, help="Seconds to wait for one answer.")] = 30.0,
    budget: Annotated[
        float, typer.Option(min=0.1, max=MAX_SECONDS, help="Seconds for all properties of one provider.")
    ] = 300.0,
) -> None:
    """Test live providers for exactness, property by property.

    Status 1 if a provider breaks a property, does not answer in time, or could not be tested at all. The provider is
    named with the property and the smallest request found. Only random test data is sent, never yours.
    """
    chosen = secrets.randbelow(2**32) if seed is None else seed
    subjects = _subjects(federation, model, seed=chosen, deadline=deadline)
    from threat_model.conformance.trials import passed

    begun = time.monotonic()
    terminal.say(f"model {subjects[0].oracle.manifest.digest}")
    results = run_properties(subjects, examples=examples, seed=chosen, budget=budget)
    total, seconds = sum(r.examples for r in results), time.monotonic() - begun
    terminal.say(
        f"\n{total} examples in {seconds:.1f} s; --seed {chosen} repeats them. They show how these requests were "
        f"answered, not how later requests will be: every session verifies each of its own answers."
    )
    raise typer.Exit(0 if passed(results) else 1)


def _subjects(path: Path, model: str, *, seed: int, deadline: float) -> list[Subject]:
    """The providers of a federation file, once for each address."""
    from symbiosis_priv.federation import load_federation

    federation = load_federation(path)
    digest, own = federation.model_digest, Identity(federation.tenant_certificate, federation.tenant_key)
    require_identity(own, kind=Kind.TENANT)
    checkpoint = resolve(model)
    with interrupts.loading("torch"):
        from symbiosis_priv.checkpoints.weights import WeightStore
        from threat_model.conformance.oracle import Oracle
        from threat_model.conformance.subject import Subject

    store = WeightStore(checkpoint, weight_bits=federation.weight_bits, scope=federation.scope)
    with terminal.progress_bar("quantising") as progress:
        found = store.manifest(progress=progress).digest
    if found != digest:
        raise CheckpointError(f"{model} is model {found}, but the federation pins {digest}: these cannot be compared")
    oracle = Oracle(store, seed=seed)
    peers = [one for peer in (*federation.executors, *federation.helpers) for one in peer.by_address]
    return [Subject(peer, own, oracle, deadline) for peer in peers]


_STYLE = {"holds": "green", "broken": "bold red", "not served": "dim", "not tested": "dim"}


def run_properties(subjects: Sequence[Subject], *, examples: int, seed: int, budget: float) -> list[PropertyResult]:
    """Run every property, and print each result at once. A provider's name, and a reason, are printed once."""
    from threat_model.conformance.properties import PROPERTIES
    from threat_model.conformance.trials import verify

    console = terminal.console()
    results: list[PropertyResult] = []
    total = sum(s.role in p.roles for s in subjects for p in PROPERTIES)

    def say(text: str, style: str | None = None) -> None:
        # a provider may have chosen part of the text
        text = "".join(char if char.isprintable() else " " for char in text)
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    with terminal.progress(TimeElapsedColumn(), of=console) as bar:
        task = bar.add_task(subjects[0].name, total=total)
        for found in verify(subjects, PROPERTIES, examples=examples, seed=seed, budget_s=budget):
            before = [r for r in results if (r.provider, r.role) == (found.provider, found.role)]
            if not before:
                console.print()
                say(f"{found.provider} ({found.role})", "bold")
            style, count = _STYLE.get(found.verdict, "bold yellow"), found.examples or ""
            say(f"  {found.verdict:<11} {found.property.name:<16} {count:>5}  {found.property.claim}", style)
            if found.reason is not None and found.reason not in {r.reason for r in before}:
                say(f"    {found.reason}", style)
            if found.violation is not None:
                say(f"    {found.provider} breaks {found.property.name}", style)
                for line in found.violation.lines():
                    say(f"      {line}")
            results.append(found)
            bar.update(task, completed=len(results), description=f"{found.provider}, after {found.property.name}")
    return results
