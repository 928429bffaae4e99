"""What the commands of `symbiosis-priv bench` share: options, parsers of their values, and the frame `benchmark`."""

import inspect
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Concatenate

import typer

from symbiosis_priv.display import terminal
from symbiosis_priv.errors import ConfigError, ProtocolError
from tenant.bench.report import Goal, Row, Table, this_run, write
from tenant.cli.options import Json, quiet, takes

Rows = Annotated[str, typer.Option(help="Rows per call, separated by commas.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences of a batch.")]
Tokens = Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")]
Masking = Annotated[str, typer.Option(help="The masking scheme.")]
Maskings = Annotated[
    str,
    typer.Option(
        "--masking",
        help="Masking schemes, separated by commas; pad/24 is pad in a ring of 24 bits, pad/two with two round trips "
        "per block.",
    ),
]
Seconds = Annotated[float, typer.Option(min=0.1, help="Length of each measurement.")]

Progress = Callable[[str], None]


def numbers(text: str, option: str) -> list[int]:
    """Parse positive integers between commas. Raises `ConfigError` for anything else."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{option} {text!r}: write whole numbers separated by commas, like 1,8,64")
    return found


def show(rows: Sequence[Row]) -> None:
    table = Table.of(rows)
    title = ", ".join(f"{name} {value}" for name, value in table.shared.items())
    terminal.console().print(terminal.table(table.headings, table.rows, title=title, justify="right"))


def benchmark(
    name: str, *, goals: Callable[[Sequence[Row]], Iterable[Goal]] = lambda _: ()
) -> Callable[[Callable[Concatenate[Path, Progress, ...], Iterable[Row]]], Callable[..., None]]:
    """Decorator: make the command of a benchmark from the function that measures, which yields rows.

    The function takes an empty folder, a function that shows progress, and keywords, which become options as in
    `takes`. The command also has --json. It shows the rows and the goals for them, and writes them. Then it raises
    `ProtocolError` if a figure `wrong`, which counts wrong answers, is not 0.
    """

    def command(work: Callable[Concatenate[Path, Progress, ...], Iterable[Row]]) -> Callable[..., None]:
        def run(*, json: Json = None, **given: Any) -> None:
            quiet()
            rows = []
            with (
                tempfile.TemporaryDirectory(prefix="symbiosis-priv-bench-") as folder,
                terminal.console(stderr=True).status("starting providers and tenants") as status,
            ):
                for row in work(Path(folder), status.update, **given):
                    rows.append(row)
                    status.update(f"{len(rows)} measured")
            show(rows)
            reached = list(goals(rows))
            for goal in reached:
                style = {"reached": "green", "missed": "yellow"}[goal.verdict]
                measured = float("nan") if goal.measured is None else goal.measured
                terminal.console().print(f"[{style}]{goal.verdict}[/]: {goal.what}: {measured:.3g}, {goal.wanted}")
            if json is not None:
                write(json, this_run(name, rows, reached))
            if wrong := sum(int(row.get("wrong") or 0) for row in rows):
                raise ProtocolError(f"{wrong} answers differ from those that the same tenant received alone")

        _, _, *options = inspect.signature(work, eval_str=True).parameters.values()
        options.append(inspect.signature(run).parameters["json"])
        run.__name__, run.__doc__ = name, work.__doc__
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # what `takes` reads
        return takes(run)

    return command
