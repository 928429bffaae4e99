"""`symbiosis-priv threat-model`: runs all attacks against this project."""

import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TimeElapsedColumn

from symbiosis_priv.display import terminal
from symbiosis_priv.system.files import output_file, write_atomically
from tenant.cli.options import loading


def threat_model(
    *,
    json: Annotated[Path | None, typer.Option("--json", callback=output_file, help="Write every figure here.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", callback=output_file, help="Write one page with pictures here.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer schemes and rows; about 75 seconds.")] = False,
) -> None:
    """Attack every masking scheme on a real run and report what leaks. Status 1 if a verdict is not as promised."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # after the environment is set; torch is imported here, so that --help does not wait for it
    with loading():
        import torch

        from threat_model.lab import Lab
        from threat_model.report.page import to_html
        from threat_model.report.tables import show, to_json
        from threat_model.suite import run_suite

    shown = terminal.console(stderr=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        terminal.progress(TimeElapsedColumn(), of=shown) as bar,
        nullcontext() if shown.is_terminal else terminal.working("attacking every scheme"),
    ):
        task = bar.add_task("base model, certificates, providers", total=None)

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # matrices are small here, and more threads would mostly wait for each other
        try:
            with Lab(Path(folder)) as lab:
                suite = run_suite(lab, quick=quick, on_progress=update)
        finally:
            torch.set_num_threads(threads)
    console = terminal.console()
    show(suite, console)
    if json is not None:
        write_atomically(json, to_json(suite).encode())
    if html is not None:
        write_atomically(html, to_html(suite).encode())
    if suite.as_expected:
        console.print(f"Every verdict is the promised one ({suite.seconds:.0f} s).", style="green")
    else:
        wrong = [f"{c.attack.name} on {c.scheme.name}: {c.verdict}" for c in suite.cells if not c.expected]
        wrong += [f"planted fault not found: {p.fault}" for p in suite.planted if not p.found]
        wrong += [f"routes of experts = '{c.mode}'" for c in suite.routes if not c.expected]
        wrong += [] if suite.active.sound else ["active adversaries: see the table"]
        console.print("Not as promised: " + "; ".join(wrong), style="bold red")
        raise typer.Exit(1)
