"""Writes result files as tables into docs/benchmarks-detail.md, the tables of each benchmark between a pair of markers.

The goals of all benchmarks are in one table, if the document has markers for it. Tables and goals of a benchmark
without a new result file stay.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.system.files import read_text, write_atomically
from tenant.bench.results.goals import goals
from tenant.bench.results.result_file import ResultFile, Row, Value

_UNITS = {"_per_s": "/s", "_s": " s", "_ms": " ms", "_us": " µs", "_mib": " MiB", "_mb": " MB"}
_MARK = "<!-- bench:{kind}:{end} -->"
_GOALS = "goals"
_GOAL_HEADINGS = ("benchmark", "what", "wanted", "measured", "")


def update(path: Path, reports: Sequence[ResultFile]) -> None:
    """Replace the tables of a document by those of `reports`. Tables of other benchmarks stay.

    Raises:
        ConfigError: the document lacks the markers of a benchmark.
        StorageError: the document cannot be written.
    """
    text = read_text(path)
    kinds = list(dict.fromkeys(report.benchmark for report in reports))
    for kind in kinds:
        block = _block(text, kind)
        if block is None:
            begin, end = _marks(kind)
            raise ConfigError(f"{path} has no place for {kind}: write the lines {begin} and {end} where it belongs")
        text = _replaced(text, block, [render(report) for report in reports if report.benchmark == kind])
    if (block := _block(text, _GOALS)) is not None:
        kept = [line for line in block["lines"].splitlines()[2:] if _kind_of(line) not in kinds]
        new = [line for report in reports for line in _goal_lines(report)]
        lines = sorted(kept + new, key=_kind_of)
        text = _replaced(text, block, [_table(_GOAL_HEADINGS, []) + "".join(f"{line}\n" for line in lines)])
    write_atomically(path, text.encode())


def _marks(kind: str) -> tuple[str, str]:
    return _MARK.format(kind=kind, end="begin"), _MARK.format(kind=kind, end="end")


def _block(text: str, kind: str) -> re.Match[str] | None:
    begin, end = map(re.escape, _marks(kind))
    return re.search(f"{begin}\n(?P<lines>.*?){end}", text, re.DOTALL)


def _replaced(text: str, block: re.Match[str], tables: Sequence[str]) -> str:
    return text[: block.start("lines")] + "\n".join(tables) + text[block.end("lines") :]


def _goal_lines(report: ResultFile) -> list[str]:
    return [
        _line([report.benchmark, goal.what, goal.wanted, _cell(goal.measured), goal.verdict])
        for goal in goals(report.benchmark, report.rows)
    ]


def _kind_of(goal_line: str) -> str:
    return goal_line.split("|")[1].strip()


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


def render(report: ResultFile) -> str:
    """Format a result file: its command, date, machine and versions, then a table."""
    machine, table = report.machine, Table.of(report.rows)
    head = (
        f"{report.date[:10]}, {machine.cpu}, {machine.cores} cores "
        f"({', '.join(machine.instructions) or 'no extensions'}), {machine.memory_gib:g} GiB, "
        f"{machine.gpu or 'no GPU'}, "
        f"{', '.join(f'{name} {number}' for name, number in report.versions.items())}"
    )
    lines = [f"`{report.command}`", "", head + ".", ""]
    if table.shared:
        lines += [f"In every row: {'; '.join(f'{name} {value}' for name, value in table.shared.items())}.", ""]
    return "\n".join(lines) + "\n" + _table(table.headings, table.rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"{_line(cells)}\n" for cells in (headings, ["---"] * len(headings), *rows))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


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
