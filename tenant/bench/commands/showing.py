"""What is around every measurement: what is going on meanwhile, its figures on the screen and in a file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from symbiosis_priv.display import terminal
from tenant.cli.options import quiet

if TYPE_CHECKING:  # imports torch: not for --help
    from tenant.bench.report import Row


@contextmanager
def measuring() -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A folder that is gone afterwards, and how to say what is going on."""
    quiet()
    console = terminal.console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="symbiosis-priv-bench-") as folder,
        console.status("starting providers and tenants") as status,
    ):
        yield Path(folder), status.update


def finish(benchmark: str, rows: Sequence[Row], json: Path | None) -> None:
    """Show the figures, and what was wanted of them, and write them."""
    show(rows)
    show_goals(benchmark, rows)
    write(json, benchmark, rows)


def show(rows: Sequence[Row]) -> None:
    """Figures as a table on the screen."""
    from tenant.bench.markdown import Table

    table = Table.of(rows)
    title = ", ".join(f"{name} {value}" for name, value in table.shared.items())
    terminal.console().print(terminal.table(table.headings, table.rows, title=title, justify="right"))


def show_goals(benchmark: str, rows: Sequence[Row]) -> None:
    """What these figures should be, where something is wanted of them."""
    from tenant.bench.goals import goals

    for goal in goals(benchmark, rows):
        style = "green" if goal.reached else "yellow"
        terminal.console().print(f"[{style}]{goal.verdict}[/]: {goal.what}: {goal.measured:.3g}, {goal.wanted}")


def write(path: Path | None, benchmark: str, rows: Sequence[Row]) -> None:
    """Write figures to where --json says, if it does."""
    from tenant.bench import report as reports

    if path is not None:
        reports.write(path, reports.report(benchmark, rows))
