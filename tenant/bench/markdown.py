"""Reports as the tables of docs/benchmarks.md: each kind between its own pair of markers, everything else untouched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.files import write_atomically
from tenant.bench.report import Report, Row, Value

_UNITS = {"_per_s": "/s", "_s": " s", "_ms": " ms", "_us": " µs", "_mib": " MiB"}
_MARK = "<!-- bench:{kind}:{end} -->"


def update(path: Path, reports: Sequence[Report]) -> None:
    """Replace the tables of a document by those of reports; kinds that no report is of stay.

    Raises:
        ConfigError: the document lacks a kind's markers.
        StorageError: it cannot be written.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for kind in dict.fromkeys(report.benchmark for report in reports):
        begin, end = (_MARK.format(kind=kind, end=word) for word in ("begin", "end"))
        block = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
        old = block.search(text)
        if old is None:
            raise ConfigError(f"{path} has no place for {kind}: write the lines {begin} and {end} where it belongs")
        tables = "\n".join(render(report) for report in reports if report.benchmark == kind)
        text = f"{text[: old.start()]}{begin}\n{tables}{end}{text[old.end() :]}"
    write_atomically(path, text.encode())


@dataclass(frozen=True)
class Table:
    """Rows of a report as text: what is the same in all of them stands apart."""

    shared: dict[str, str]
    headings: list[str]
    rows: list[list[str]]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Table:
        """Of at least one row."""
        shared = [name for name in rows[0] if len(rows) > 1 and len({row.get(name) for row in rows}) == 1]
        shown = [name for name in rows[0] if name not in shared]
        return cls(
            {_heading(name): _cell(rows[0][name]) for name in shared},
            [_heading(name) for name in shown],
            [[_cell(row.get(name)) for name in shown] for row in rows],
        )


def render(report: Report) -> str:
    """A report as a table with what it is true for."""
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
    lines += [_line(table.headings), _line(["---"] * len(table.headings)), *map(_line, table.rows)]
    return "\n".join(lines) + "\n"


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
