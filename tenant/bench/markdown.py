"""Reports as the tables of docs/benchmarks.md: each kind between its own pair of markers, everything else untouched."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.files import write_atomically
from tenant.bench.report import Report, Value

_UNITS = {"_s": " s", "_ms": " ms", "_us": " µs", "_mib": " MiB"}
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
        if not block.search(text):
            raise ConfigError(f"{path} has no place for {kind}: write the lines {begin} and {end} where it belongs")
        tables = "\n".join(render(report) for report in reports if report.benchmark == kind)
        text = block.sub(lambda _, new=f"{begin}\n{tables}{end}": new, text)
    write_atomically(path, text.encode())


def render(report: Report) -> str:
    """A report as a table with what it is true for. What is the same in every row stands above it."""
    machine, rows = report.machine, report.rows
    columns = list(rows[0]) if rows else []
    shared = [name for name in columns if len(rows) > 1 and len({row.get(name) for row in rows}) == 1]
    shown = [name for name in columns if name not in shared]
    head = (
        f"{report.date[:10]}, {machine.cpu}, {machine.cores} cores ({', '.join(machine.instructions) or 'no extensions'}), "
        f"{machine.memory_gib:g} GiB, {machine.gpu or 'no GPU'}, "
        f"{', '.join(f'{name} {number}' for name, number in report.versions.items())}"
    )
    facts = "; ".join(f"{_heading(name)}: {_cell(rows[0][name])}" for name in shared)
    lines = [f"`{report.command}`", "", head + ".", ""]
    if facts:
        lines += [f"In every row: {facts}.", ""]
    lines += [_line([_heading(name) for name in shown]), _line(["---"] * len(shown))]
    lines += [_line([_cell(row.get(name)) for name in shown]) for row in rows]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _heading(name: str) -> str:
    unit = next((suffix for suffix in _UNITS if name.endswith(suffix)), "")
    words = name.removesuffix(unit).replace("_", " ")
    return f"{words}{',' if unit else ''}{_UNITS.get(unit, '')}"


def _cell(value: Value) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def cells(row: Mapping[str, Value]) -> list[str]:
    """A row for a terminal's table."""
    return [_cell(value) for value in row.values()]


def headings(row: Mapping[str, Value]) -> list[str]:
    """The names of its figures."""
    return [_heading(name) for name in row]
