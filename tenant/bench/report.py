"""The figures of a benchmark: the file that --json writes, its tables, the goals for its figures, and `bench report`.

The name of a figure ends in its unit (`wall_s`, `masked_p50_us`, `tenant_peak_mib`); a figure without a unit is a
ratio, a count or a word. A goal is a limit for a ratio of figures of one run, chosen for two cores that all processes
share. Each benchmark states its goals beside its measurement; rows that were not measured have none.
"""

import math
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Self

import msgspec
import numpy as np
import psutil
import torch
import typer

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.system.files import UNDECODABLE, write_atomically

SCHEMA = 1
_DISTRIBUTIONS = ("symbiosis-priv", "torch", "transformers", "peft")
# kernels are chosen by CPU features
_INTERESTING = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimddp")
_UNITS = {"_per_s": "/s", "_s": " s", "_ms": " ms", "_us": " µs", "_mib": " MiB", "_mb": " MB"}

Value = float | int | str | None
Row = dict[str, Value]


class Goal(msgspec.Struct, frozen=True):
    """A limit for one figure, which is None if it could not be measured. One of `at_most`, `at_least` is None."""

    what: str
    measured: float | None
    at_most: float | None = None
    at_least: float | None = None

    @property
    def wanted(self) -> str:
        return f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"

    @property
    def verdict(self) -> str:
        """Whether the figure is within its limit; NaN and None are not."""
        measured = math.nan if self.measured is None else self.measured
        within = measured <= self.at_most if self.at_most is not None else measured >= (self.at_least or 0.0)
        return "reached" if within else "missed"


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    cores: int
    instructions: tuple[str, ...]
    memory_gib: float
    gpu: str | None
    system: str


class ResultFile(msgspec.Struct, frozen=True):
    """A file of figures of one machine. `date`: UTC, ISO 8601. `rows`: figures by name, the same names in all rows."""

    schema: int
    benchmark: str
    date: str
    command: str
    machine: Machine
    versions: dict[str, str]
    rows: list[Row]
    goals: list[Goal] = []


def percentile(seconds: Sequence[float], q: float, *, unit: float = 1.0) -> float:
    """Return the q-th percentile of some times, in units of `unit` seconds."""
    return float(np.percentile(seconds, q)) / unit


def this_run(benchmark: str, rows: Sequence[Row], goals: Sequence[Goal] = ()) -> ResultFile:
    return ResultFile(
        schema=SCHEMA,
        benchmark=benchmark,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["symbiosis-priv", *sys.argv[1:]]),
        machine=this_machine(),
        versions={"python": platform.python_version(), **{name: version(name) for name in _DISTRIBUTIONS}},
        rows=list(rows),
        goals=list(goals),
    )


def this_machine() -> Machine:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].split("\n")
    except OSError:  # not Linux
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return Machine(
        cpu=facts.get("model name") or platform.processor() or platform.machine(),
        cores=os.cpu_count() or 1,
        instructions=tuple(name for name in _INTERESTING if name in flags),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        system=f"{platform.system()} {platform.release()}",
    )


def write(path: Path, figures: ResultFile) -> None:
    """Write a result file as indented JSON. Raises `StorageError`: the file cannot be written."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


def read(path: Path) -> ResultFile:
    """Read a result file. Raises `ConfigError`: it cannot be read, is no result file, or is of another release."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=ResultFile)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UNDECODABLE as error:
        raise ConfigError(f"{path} is not a report of `symbiosis-priv bench`: {error}") from error
    if found.schema != SCHEMA:
        raise ConfigError(f"{path} is of schema {found.schema}; this release reads schema {SCHEMA}: measure again")
    return found


def distinct(rows: Sequence[Row], *names: str) -> list[Row]:
    """Return the different combinations of values in these columns, in order."""
    return [
        dict(zip(names, values, strict=True)) for values in dict.fromkeys(tuple(map(row.get, names)) for row in rows)
    ]


def where(rows: Sequence[Row], **values: Value) -> list[Row]:
    return [row for row in rows if all(row.get(name) == value for name, value in values.items())]


def by(rows: Sequence[Row], name: str) -> dict[Value, Row]:
    """Return the rows by their value in a column."""
    return {row[name]: row for row in rows}


def figure(row: Row, name: str) -> float:
    """Return a figure for a goal: NaN if it was not measured."""
    value = row[name]
    return float("nan") if value is None or isinstance(value, str) else float(value)


def ratio(row: Row, other: Row, name: str) -> float:
    """Return the ratio of a figure of two rows: NaN if one was not measured, or the second is 0."""
    over = figure(other, name)
    return figure(row, name) / over if over else float("nan")


@dataclass(frozen=True)
class Table:
    """Rows of a report as text. `shared` has the columns with the same value in all rows."""

    shared: dict[str, str]
    headings: list[str]
    rows: list[list[str]]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """Make the table of at least one row."""
        shared = [name for name in rows[0] if len(rows) > 1 and len({row.get(name) for row in rows}) == 1]
        shown = [name for name in rows[0] if name not in shared]
        return cls(
            {_heading(name): _cell(rows[0][name]) for name in shared},
            [_heading(name) for name in shown],
            [[_cell(row.get(name)) for name in shown] for row in rows],
        )


def render(reports: Sequence[ResultFile]) -> str:
    """Format result files as a page: a section per benchmark, with command, machine, table and goals of each file."""
    page = ""
    for report in sorted(reports, key=lambda one: [other.benchmark for other in reports].index(one.benchmark)):
        heading = f"\n## {report.benchmark}\n"
        page += "\n" if heading in page else f"{heading}\n"
        machine, table = report.machine, Table.of(report.rows)
        versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
        where_run = (
            f"{machine.cpu}, {machine.cores} cores ({', '.join(machine.instructions) or 'no extensions'}), "
            f"{machine.memory_gib:g} GiB, {machine.gpu or 'no GPU'}, {versions}"
        )
        shown = f"{machine.cpu} as above" if where_run in page else where_run
        page += f"`{report.command}`\n\n{report.date[:10]}, {shown}.\n\n"
        if table.shared:
            page += f"In every row: {'; '.join(f'{name} {value}' for name, value in table.shared.items())}.\n\n"
        head, *lines = (f"| {' | '.join(cells)} |\n" for cells in (table.headings, *table.rows))
        page += f"{head}|{'---|' * len(table.headings)}\n{''.join(lines)}"
        for goal in report.goals:
            page += f"\nGoal {goal.verdict}: {goal.what}, {goal.wanted}: {_cell(goal.measured)}.\n"
    return page.lstrip("\n")


def _heading(name: str) -> str:
    unit = next((suffix for suffix in _UNITS if name.endswith(suffix)), "")
    words = name.removesuffix(unit).replace("_", " ")
    return f"{words}{',' if unit and unit != '_per_s' else ''}{_UNITS.get(unit, '')}"


def _cell(value: Value) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def report(files: Annotated[list[Path], typer.Argument(help="What --json has written.")]) -> None:
    """Print --json files as tables in Markdown."""
    typer.echo(render([read(file) for file in files]), nl=False)
