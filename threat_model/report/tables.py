"""A suite's figures as tables, in a terminal and on a page of HTML."""

import io
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from symbiosis_priv.display import terminal
from threat_model.evidence.schemes import AttackedScheme
from threat_model.evidence.statistics import CONFIDENCE, FALSE_ALARM, gaussian_channel_bits
from threat_model.evidence.views import PARTIES
from threat_model.report.security_table import NOT_HIDDEN
from threat_model.suite import Cell, Suite, Verdict

_STYLE = {
    Verdict.HIDDEN: ("green", "✓"),
    Verdict.BROKEN: ("red", "✗"),
    Verdict.RESISTED: ("yellow", "~"),
    Verdict.BY_DESIGN: ("cyan", "○"),
    Verdict.ABSENT: ("dim", "–"),
}
_FULL, _SHORT = 17, 10  # columns of a scheme, with and without the chance level
_PAGE_WIDTH = 320


def show(suite: Suite, console: Console) -> None:
    """Print the tables."""
    console.print(_tables(suite, width=console.width))


def to_html(suite: Suite) -> str:
    """The tables as one self-contained page of HTML, also with the attacks and their sources."""
    console = Console(record=True, file=io.StringIO(), width=_PAGE_WIDTH)
    console.print(_tables(suite, width=_PAGE_WIDTH))
    attacks = dict.fromkeys(cell.attack for cell in suite.cells)
    sources = [(a.name, a.party, a.sees, a.metric, a.chance, a.source) for a in attacks]
    headings = ("attack", "by", "sees", "metric", "chance", "source")
    console.print(terminal.table(headings, sources, title="Attacks and their sources"))
    return console.export_html(inline_styles=True)


def _tables(suite: Suite, *, width: int) -> RenderableType:
    """The tables for `width` columns. A narrow terminal does not show the chance level."""
    room = width - 4 - max(len(c.attack.name) for c in suite.cells)
    full = room // _FULL >= min(6, len(suite.schemes))
    beside = max(1, room // (_FULL if full else _SHORT))
    attacks = [
        _attack_table(suite, suite.schemes[start : start + beside], full=full)
        for start in range(0, len(suite.schemes), beside)
    ]
    legend = ", ".join(f"{mark} {verdict}" for verdict, (_, mark) in _STYLE.items())
    return Group(
        *attacks,
        Text(f"{'success | chance' if full else 'success'}, in %. {legend}; ! not as promised", style="dim"),
        _summary_table(suite),
        Text(_interval_note(suite), style="dim"),
        _pool_table(suite),
        _adapter_table(suite),
        _planted_table(suite),
        *_active_tables(suite),
        _routes_table(suite),
        terminal.table(("what", "shown by"), NOT_HIDDEN, title="Not hidden, by any scheme"),
    )


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
    style, mark = _STYLE[cell.verdict]
    alarm = "" if cell.expected else " !"
    if cell.outcome is None:
        return Text(mark + alarm, style=style)
    success, chance = (f"{100 * rate:.1f}" for rate in (cell.outcome.success, cell.outcome.chance))
    return Text.assemble((success, style), (f" | {chance} " if full else " ", "dim"), (mark + alarm, style))


def _summary_table(suite: Suite) -> Table:
    rows = []
    needs = {"helper": 1, "executor+helper": 1, "all but a helper": 2}
    for scheme in suite.schemes:
        cells = [c for c in suite.cells if c.scheme is scheme]
        held = [c for c in cells if c.promised and c.verdict is not Verdict.ABSENT]
        fell = [c for c in cells if not c.promised and not c.attack.by_design and c.outcome and c.outcome.broken]
        by = Counter(cell.attack.party for cell in fell)
        rows.append(
            (
                scheme.name,
                ", ".join(p for p in PARTIES if p in scheme.hides_from and scheme.helpers >= needs.get(p, 0)),
                f"{sum(c.verdict is Verdict.HIDDEN for c in held)} of {len(held)}",
                ", ".join(f"{count} by {party}" for party, count in by.items()) or "none",
                _yes(all(c.expected for c in cells)),
            )
        )
    headings = ("scheme", "hides rows from", "their attacks that fail", "attacks of others that succeed", "as promised")
    return _judged_table("What that means", headings, rows)


def _interval_note(suite: Suite) -> str:
    outside, promised = suite.outside
    return (
        f"{promised} cells are promised to be hidden. In {outside} of them chance lies outside the cell's own "
        f"{CONFIDENCE:.0%} interval; {promised * (1 - CONFIDENCE):.1f} are expected to, by chance. A cell counts as "
        f"broken only if chance alone does as well less than once in {1 / FALSE_ALARM:,.0f} times."
    )


def _pool_table(suite: Suite) -> Table:
    """What candidate subtraction costs and reads, beside the bound for noise that is used once."""
    rows = []
    for cell in suite.cells:
        noise = cell.scheme.noise_scale
        if cell.attack.name != "candidate subtraction, forward" or noise is None or cell.outcome is None:
            continue
        f = cell.outcome.figures
        rows.append(
            (
                cell.scheme.name,
                f"{f['distances tried']:,.0f}",
                f"10^{f['combinations, log10']:.0f}",
                f"{f['worst layer']:.1%}",
                f"{f['median relative error']:.1e}",
                f"{gaussian_channel_bits(noise):.2g}",
            )
        )
    headings = (
        "scheme",
        "distances tried",
        "combinations the paper counts",
        "rows read, worst layer",
        "median error",
        "bits per coordinate of fresh noise",
    )
    return terminal.table(
        headings, rows, title="What candidate subtraction costs: each layer on its own", justify="right"
    )


def _adapter_table(suite: Suite) -> Table:
    names = ("worst relative error", "loss, base model", "loss, stolen", "loss, true")
    found = [c for c in suite.cells if c.outcome and "loss, stolen" in c.outcome.figures]
    rows = [(c.scheme.name, *(f"{c.outcome.figures[name]:.3g}" for name in names)) for c in found if c.outcome]
    return terminal.table(("scheme", *names), rows, title="Stolen adapters, and loss on private text", justify="right")


def _planted_table(suite: Suite) -> Table:
    rows = [
        (p.fault, p.rule, p.attack, f"{p.outcome.success:.1%}", f"{p.outcome.chance:.1%}", _yes(p.found))
        for p in suite.planted
    ]
    return _judged_table("Planted faults", ("fault", "breaks", "attack", "success", "chance", "found"), rows)


def _active_tables(suite: Suite) -> list[Table]:
    by_valuation = [d for d in suite.active.detections if d.valuation is not None]
    caught, trials = sum(d.caught for d in by_valuation), sum(d.trials for d in by_valuation)
    worst = min(d.caught / d.trials for d in by_valuation)
    lies = [("errors of valuation 0..31", f"{caught} of {trials}", f"worst valuation {worst:.0%}")]
    for d in suite.active.detections:
        if d.valuation is None:
            lies.append((d.name, f"{d.caught} of {d.trials}", f"{d.interval.low:.1%}"))
    for leak in suite.active.leaks:
        aborted, told = f"{leak.aborts} of {leak.trials} aborted", f"tells {leak.information:.3f} bits of a secret bit"
        lies.append((f"selective abort, {leak.name}", aborted, told))
    forgeries = [
        (str(f.columns), str(f.valuation), f"{f.passed} of {f.trials}", f"{f.theory:.2%}")
        for f in suite.active.forgeries
    ]
    return [
        terminal.table(("lie", "caught", "at least (99 %)"), lies, title="Active adversaries"),
        terminal.table(
            ("columns", "valuation of the error", "convict nobody", "2^-((32-v) columns)"),
            forgeries,
            title="Fault attribution with few columns: lies that convict nobody",
        ),
    ]


def _routes_table(suite: Suite) -> Table:
    rows = []
    for cell in suite.routes:
        outcome, interval = cell.outcome, cell.outcome.interval
        rates = f"{outcome.success:.0%}", f"{outcome.chance:.0%}", f"{interval.low:.0%} to {interval.high:.0%}"
        rows.append((cell.mode, *rates, "hidden" if cell.promised else "nothing", _yes(cell.expected)))
    headings = ("experts", "success", "chance", "99 % interval", "promised", "as promised")
    return _judged_table("Mixture of experts: decoded tokens from routes", headings, rows)


def _judged_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose last column says "yes" or "NO". Rows with "NO" are red."""
    styles = ["" if row[-1] == _yes(True) else "bold red" for row in rows]
    return terminal.table(headings, rows, title=title, styles=styles)


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"
