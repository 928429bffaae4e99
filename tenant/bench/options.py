"""What the commands of `symbiosis-priv bench` share: options, parsers of their values, and the frame `benchmark`."""

import inspect
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Concatenate, get_args

import typer

from symbiosis_priv.display import terminal
from symbiosis_priv.errors import ConfigError, ProtocolError
from symbiosis_priv.limits import RingBits
from symbiosis_priv.system.files import output_file
from tenant.bench.measured_models import RELAY, TWO, check_width
from tenant.bench.report import Goal, Row, Table, number, this_run, write
from tenant.cli.options import quiet, takes
from tenant.masking.registry import session_scheme

Rows = Annotated[str, typer.Option(help="Rows per call, separated by commas.")]
Json = Annotated[
    Path | None, typer.Option("--json", callback=output_file, help="Also write every figure to this file.")
]
Threads = Annotated[int, typer.Option(min=1, help="Torch threads of each process.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences of a batch.")]
Tokens = Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")]
Masking = Annotated[str, typer.Option(help="The masking scheme.")]
Maskings = Annotated[
    str,
    typer.Option(
        "--masking",
        help="Masking schemes, separated by commas; pad/24 is pad in a ring of 24 bits, pad/24/relay with relayed "
        "effects, pad/two with two round trips per block.",
    ),
]
Seconds = Annotated[float, typer.Option(min=0.1, help="Length of each measurement.")]

Progress = Callable[[str], None]
Goals = Callable[[Sequence[Row]], Iterable[Goal]]
Show = Callable[[Sequence[Row]], None]


def scheme(name: str) -> str:
    """Parse the name of a masking scheme that has a session, such as `pad`, `pad/24` in a ring of 24 bits,
    `pad/24/relay` with relayed effects, or `pad/two` with two round trips per block."""
    masking, *flags = name.strip().split("/")
    known = (*map(str, get_args(RingBits)), RELAY, TWO)
    if unknown := set(flags) - set(known):
        raise ConfigError(f"{name!r}: {unknown.pop()!r} after a slash is not one of {', '.join(known)}")
    session_scheme(masking)
    return name.strip()


def numbers(text: str, option: str) -> list[int]:
    """Parse positive integers between commas. Raises `ConfigError` for anything else."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{option} {text!r}: write whole numbers separated by commas, like 1,8,64")
    return found


def widths(text: str) -> list[int]:
    """Parse multiples of 64 between commas, the value of --width. Raises `ConfigError` for anything else."""
    found = numbers(text, "--width")
    for width in found:
        check_width(width)
    return found


def names(text: str, known: Sequence[str], option: str) -> list[str]:
    """Parse names between commas. Raises `ConfigError` for a name that is not in `known`."""
    found = [name.strip() for name in text.split(",")]
    if unknown := set(found) - set(known):
        raise ConfigError(f"{option}: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")
    return found


def schemes(text: str) -> list[str]:
    """Parse names of masking schemes between commas, as `scheme` does."""
    return [scheme(name) for name in text.split(",")]


def show(rows: Sequence[Row]) -> None:
    """Show figures as a table."""
    table = Table.of(rows)
    title = ", ".join(f"{name} {value}" for name, value in table.shared.items())
    terminal.console().print(terminal.table(table.headings, table.rows, title=title, justify="right"))


def benchmark(
    name: str, *, goals: Goals = lambda _: (), show: Show = show
) -> Callable[[Callable[Concatenate[Path, Progress, ...], Iterable[Row]]], Callable[..., None]]:
    """Decorator: make the command of a benchmark from the function that measures, which yields rows.

    The function takes a new folder, a function that shows progress, and keywords, which become options as in `takes`.
    The command also has --json. `goals` and `show` are as for `measure`.
    """

    def command(work: Callable[Concatenate[Path, Progress, ...], Iterable[Row]]) -> Callable[..., None]:
        def run(*, json: Json = None, **given: Any) -> None:
            measure(name, json, lambda folder, progress: work(folder, progress, **given), goals=goals, show=show)

        _, _, *options = inspect.signature(work, eval_str=True).parameters.values()
        options.append(inspect.signature(run).parameters["json"])
        run.__name__, run.__doc__ = name, work.__doc__
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # what `takes` reads
        return takes(run)

    return command


def measure(
    benchmark: str,
    json: Path | None,
    work: Callable[[Path, Progress], Iterable[Row]],
    *,
    goals: Goals = lambda _: (),
    show: Show = show,
) -> list[Row]:
    """Run a benchmark, then show its figures and goals, and write them to the file that --json names.

    Args:
        json: file to write; None for no file.
        work: returns the rows; called with an empty folder and a function that shows progress.
        goals: returns the goals for the rows.
        show: shows the rows.

    Raises:
        ProtocolError: a figure `wrong`, which counts wrong answers, is not 0.
    """
    rows = []
    with measuring() as (folder, progress):
        for row in work(folder, progress):
            rows.append(row)
            progress(f"{len(rows)} measured")
    show(rows)
    found = list(goals(rows))
    for goal in found:
        style = "green" if goal.reached else "yellow"
        measured = float("nan") if goal.measured is None else goal.measured
        terminal.console().print(f"[{style}]{goal.verdict}[/]: {goal.what}: {measured:.3g}, {goal.wanted}")
    if json is not None:
        write(json, this_run(benchmark, rows, found))
    if wrong := sum(int(number(row.get("wrong", 0))) for row in rows):
        raise ProtocolError(f"{wrong} answers differ from those that the same tenant received alone")
    return rows


@contextmanager
def measuring() -> Iterator[tuple[Path, Progress]]:
    """Context manager: yields a temporary folder and a function that shows progress."""
    quiet()
    console = terminal.console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="symbiosis-priv-bench-") as folder,
        console.status("starting providers and tenants") as status,
    ):
        yield Path(folder), status.update
