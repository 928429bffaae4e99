"""A suite's figures as tables in a terminal."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from threat_model.evidence.schemes import AttackedScheme
from threat_model.report.rows import (
    MARKS,
    ROUTES,
    SUMMARY,
    interval_note,
    planted_row,
    pool_cells,
    route_row,
    summary_rows,
)
from threat_model.report.security_table import NOT_HIDDEN
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
    """Print the tables."""
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
        _summary_table(suite),
        Text(interval_note(suite), style="dim"),
        _cost_table(suite),
        _planted_table(suite),
        _active_table(suite),
        _routes_table(suite),
        _not_hidden_table(),
    ]
    return Group(*parts)


def _summary_table(suite: Suite) -> Table:
    table = _table("What that means", *SUMMARY)
    for row in summary_rows(suite):
        table.add_row(*row, style=None if row[-1] == "yes" else "bold red")
    return table


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


def _cost_table(suite: Suite) -> Table:
    table = Table(title="What candidate subtraction costs: each layer on its own", title_justify="left")
    for name in ("scheme", "distances tried", "combinations the paper counts", "rows read, worst layer"):
        table.add_column(name, justify="right")
    for cell in pool_cells(suite, "candidate subtraction, forward"):
        assert cell.outcome is not None  # pool_cells
        f = cell.outcome.figures
        table.add_row(
            cell.scheme.name,
            f"{f['distances tried']:,.0f}",
            f"10^{f['combinations, log10']:.0f}",
            f"{f['worst layer']:.1%}",
        )
    return table


def _planted_table(suite: Suite) -> Table:
    table = _table("Planted faults", "fault", "breaks", "attack", "success", "chance", "found")
    for fault in suite.planted:
        table.add_row(*planted_row(fault), style=None if fault.found else "bold red")
    return table


def _active_table(suite: Suite) -> Table:
    table = _table("Active adversaries", "lie", "caught", "at least (99 %)")
    single = [d for d in suite.active.detections if d.valuation is None]
    by_valuation = [d for d in suite.active.detections if d.valuation is not None]
    caught, trials = sum(d.caught for d in by_valuation), sum(d.trials for d in by_valuation)
    worst = min(d.caught / d.trials for d in by_valuation)
    table.add_row("errors of valuation 0..31", f"{caught} of {trials}", f"worst valuation {worst:.0%}")
    for d in single:
        table.add_row(d.name, f"{d.caught} of {d.trials}", f"{d.interval.low:.1%}")
    for leak in suite.active.leaks:
        table.add_row(
            f"selective abort, {leak.name}",
            f"{leak.aborts} of {leak.trials} aborted",
            f"tells {leak.information:.3f} bits of a secret bit",
        )
    return table


def _routes_table(suite: Suite) -> Table:
    table = _table("Mixture of experts: decoded tokens from routes", *ROUTES)
    for cell in suite.routes:
        table.add_row(*route_row(cell), style=None if cell.expected else "bold red")
    return table


def _not_hidden_table() -> Table:
    table = _table("Not hidden, by any scheme", "what", "shown by")
    for what, attack in NOT_HIDDEN:
        table.add_row(what, attack)
    return table


def _table(title: str, *headings: str) -> Table:
    return Table(*headings, title=title, title_justify="left")
