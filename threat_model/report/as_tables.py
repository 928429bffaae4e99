"""A suite's figures as tables in a terminal."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from threat_model.evidence.schemes import AttackedScheme
from threat_model.report.sections import MARKS, Section, interval_note, last_sections, pool_cells, summary
from threat_model.suite import Cell, Suite, Verdict

_STYLE = {
    Verdict.HIDDEN: "green",
    Verdict.BROKEN: "red",
    Verdict.RESISTED: "yellow",
    Verdict.BY_DESIGN: "cyan",
    Verdict.ABSENT: "dim",
}
_FULL, _SHORT = 17, 10  # columns of a scheme, with and without the chance level


def show(suite: Suite, console: Console) -> None:
    console.print(render(suite, width=console.width))


def render(suite: Suite, *, width: int) -> RenderableType:
    """The tables for a terminal of `width` columns. A narrow terminal does not show the chance level."""
    room = width - 4 - max(len(c.attack.name) for c in suite.cells)
    full = room // _FULL >= min(6, len(suite.schemes))
    beside = max(1, room // (_FULL if full else _SHORT))
    parts: list[RenderableType] = []
    for start in range(0, len(suite.schemes), beside):
        parts.append(_attack_table(suite, suite.schemes[start : start + beside], full=full))
    legend = ", ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items())
    parts += [
        Text(f"{'success | chance' if full else 'success'}, in %. {legend}; ! not as promised", style="dim"),
        _table(summary(suite)),
        Text(interval_note(suite), style="dim"),
        _table(_cost(suite)),
        *map(_table, last_sections(suite)),
    ]
    return Group(*parts)


def _attack_table(suite: Suite, schemes: Sequence[AttackedScheme], *, full: bool) -> Table:
    table = Table(title="Attacks against masking schemes", title_justify="left", pad_edge=False)
    table.add_column("attack", no_wrap=True)
    for scheme in schemes:
        table.add_column(scheme.name.replace(" × ", "\n× "), justify="right", no_wrap=True)
    attacks = list(dict.fromkeys(c.attack for c in suite.cells))
    for party in dict.fromkeys(a.party for a in attacks):
        table.add_section()
        table.add_row(Text(f"by {party}", style="bold"))
        for attack in (a for a in attacks if a.party == party):
            cells = [_cell_text(suite.cell(attack.name, scheme.name), full=full) for scheme in schemes]
            table.add_row(attack.name, *cells)
    return table


def _cell_text(cell: Cell, *, full: bool) -> Text:
    style, mark = _STYLE[cell.verdict], MARKS[cell.verdict]
    alarm = "" if cell.expected else " !"
    if cell.outcome is None:
        return Text(mark + alarm, style=style)
    success, chance = (f"{100 * rate:.1f}" for rate in (cell.outcome.success, cell.outcome.chance))
    return Text.assemble((success, style), (f" | {chance} " if full else " ", "dim"), (mark + alarm, style))


def _cost(suite: Suite) -> Section:
    rows = []
    for cell in pool_cells(suite, "candidate subtraction, forward"):
        assert cell.outcome is not None  # pool_cells
        f = cell.outcome.figures
        tried, counted = f"{f['distances tried']:,.0f}", f"10^{f['combinations, log10']:.0f}"
        rows.append((cell.scheme.name, tried, counted, f"{f['worst layer']:.1%}"))
    headings = ("scheme", "distances tried", "combinations the paper counts", "rows read, worst layer")
    return Section("What candidate subtraction costs: each layer on its own", headings, rows)


def _table(section: Section) -> Table:
    table = Table(*section.headings, title=section.title, title_justify="left")
    for row in section.rows:
        table.add_row(*row, style="bold red" if row[-1] == "NO" else None)
    return table
