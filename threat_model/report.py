"""A suite's figures: tables in a terminal, and on one HTML page with bars and sources."""

import io
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

import symbiosis_priv
from threat_model.evidence.statistics import CONFIDENCE, FALSE_ALARM
from threat_model.evidence.views import PARTIES
from threat_model.suite import ATTACK_SEED, LIES_SEED, Cell, Suite, Verdict

NOT_HIDDEN = [
    (one["what"], one["shown_by"])
    for one in tomllib.loads(Path(__file__).with_name("not_hidden.toml").read_text(encoding="utf-8"))["not_hidden"]
]
"""Pairs of (what is not hidden, the attack that shows it)."""


# mark and style
_LOOKS = {
    Verdict.HIDDEN: ("✓", "green"),
    Verdict.BROKEN: ("✗", "red"),
    Verdict.RESISTED: ("~", "yellow"),
    Verdict.BY_DESIGN: ("○", "cyan"),
    Verdict.ABSENT: ("–", "dim"),
}


def origin(suite: Suite) -> dict[str, str]:
    """What was attacked, when and how."""
    seeds = f"tenant's work {suite.seed}, attacks {ATTACK_SEED}, lies {LIES_SEED}; keys, masks and coins are fresh"
    return {
        "version": symbiosis_priv.__version__,
        "commit": _commit(Path(symbiosis_priv.__file__).parents[1]),
        "date": f"{suite.began:%Y-%m-%d %H:%M} UTC",
        "run": "quick: fewer schemes and rows" if suite.quick else "full",
        "seeds": seeds,
    }


def _commit(root: Path) -> str:
    """The commit of a source tree, and whether files differ from it."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with suppress(OSError, subprocess.TimeoutExpired):
            if found := subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip():
                return found
    return "unknown: not run from a clone"


def summary(suite: Suite) -> Table:
    """The table with one row for each scheme."""
    rows = []
    needs = {"helper": 1, "executor+helper": 1, "all but a helper": 2}
    for scheme in suite.schemes:
        cells = [c for c in suite.cells if c.scheme is scheme]
        held = [c for c in cells if c.promised and c.verdict is not Verdict.ABSENT]
        fell = [c for c in cells if not c.promised and not c.attack.by_design and c.outcome and c.outcome.broken]
        by = Counter(cell.attack.party for cell in fell)
        hidden = ", ".join(p for p in PARTIES if p in scheme.hides_from and scheme.helpers >= needs.get(p, 0))
        failed = f"{sum(c.verdict is Verdict.HIDDEN for c in held)} of {len(held)}"
        succeeded = ", ".join(f"{count} by {party}" for party, count in by.items()) or "none"
        rows.append((scheme.name, hidden, failed, succeeded, _yes(all(c.expected for c in cells))))
    headings = ("scheme", "hides rows from", "their attacks that fail", "attacks of others that succeed", "as promised")
    return _table("Summary", headings, rows)


def sections(suite: Suite) -> list[Table]:
    """The tables after those of the attacks on schemes. Where chance has no part, there is no rate to estimate."""
    made = []
    for section in suite.sections:
        rows = []
        for trial in section.trials:
            outcome, low_high = trial.outcome, "no chance is involved"
            if outcome.trials > 1:
                low_high = f"{outcome.interval.low:.1%} to {outcome.interval.high:.1%}"
            must = {True: "yes", False: "no", None: ""}[trial.must_find]
            score = f"{outcome.hits:,} of {outcome.trials:,}", f"{outcome.chance:.1%}", low_high
            rows.append((*trial.labels, *score, must, _yes(trial.expected)))
        headings = *section.headings, "finds", "chance", "99 % interval", "must find", "as promised"
        made.append(_table(section.title, headings, rows))
    return [*made, _table("Not hidden, by any scheme", ("what", "shown by"), NOT_HIDDEN)]


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


_PAGE, _BAR = 240, 40  # columns of the HTML page, and of a bar
_FULL, _SHORT = 17, 10  # columns of a scheme, with and without the chance level


def show(suite: Suite, console: Console) -> None:
    """Print the tables. A narrow terminal does not show the chance level."""
    room = console.width - 4 - max(len(c.attack.name) for c in suite.cells)
    full = room // _FULL >= min(6, len(suite.schemes))
    beside = max(1, room // (_FULL if full else _SHORT))
    parts: list[RenderableType] = []

    def text_of(cell: Cell) -> Text:
        mark, style = _LOOKS[cell.verdict]
        mark += "" if cell.expected else " !"
        if (o := cell.outcome) is None:
            return Text(mark, style=style)
        chance = f" | {100 * o.chance:.1f} " if full else " "
        return Text.assemble((f"{100 * o.success:.1f}", style), (chance, "dim"), (mark, style))

    for start in range(0, len(suite.schemes), beside):
        schemes = suite.schemes[start : start + beside]
        table = Table(title="Attacks against masking schemes", title_justify="left", pad_edge=False)
        table.add_column("attack", no_wrap=True)
        for scheme in schemes:
            table.add_column(scheme.name.replace(" × ", "\n× "), justify="right", no_wrap=True)
        for party in dict.fromkeys(attack.party for attack in suite.attacks):
            table.add_section()
            table.add_row(Text(f"by {party}", style="bold"))
            for attack in (attack for attack in suite.attacks if attack.party == party):
                table.add_row(attack.name, *(text_of(suite.cell(attack.name, s.name)) for s in schemes))
        parts.append(table)
    legend = ", ".join(f"{mark} {verdict}" for verdict, (mark, _) in _LOOKS.items())
    costs = []
    for scheme in (scheme for scheme in suite.schemes if "masking_options" in scheme.options):  # the paper's pools
        if outcome := suite.cell("candidate subtraction, forward", scheme.name).outcome:
            f = outcome.figures
            tried, counted = f"{f['distances tried']:,.0f}", f"10^{f['combinations, log10']:.0f}"
            costs.append((scheme.name, tried, counted, f"{f['worst layer']:.1%}"))
    outside, promised = suite.outside
    note = (
        f"{promised} cells are promised to be hidden. In {outside} of them chance lies outside the cell's own "
        f"{CONFIDENCE:.0%} interval; {promised * (1 - CONFIDENCE):.1f} are expected to, by chance. A cell counts as "
        f"broken only if chance alone does as well less than once in {1 / FALSE_ALARM:,.0f} times."
    )
    headings = ("scheme", "distances tried", "combinations the paper counts", "rows read, worst layer")
    parts += [
        Text(f"{'success | chance' if full else 'success'}, in %. {legend}; ! not as promised", style="dim"),
        summary(suite),
        Text(note, style="dim"),
        _table("What candidate subtraction costs: each layer on its own", headings, costs),
        *sections(suite),
    ]
    console.print(Group(*parts))


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A row whose last cell is "NO" is not as promised."""
    table = Table(*headings, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row), style="bold red" if row[-1] == "NO" else None)
    return table


def charts(suite: Suite) -> Iterator[Table]:
    """A bar for each scheme, for every attack with several of them."""
    for attack in suite.attacks:
        scored = [(c, o) for c in suite.cells if c.attack is attack and (o := c.outcome)]
        if len(scored) > 1:
            chart = Table("scheme", "", "success", "99 % interval", "chance", title=f"{attack.name}: {attack.metric}")
            for cell, o in scored:
                bar = Bar(1.0, 0.0, o.success, width=_BAR, color=_LOOKS[cell.verdict][1].replace("dim", "white"))
                low_high = f"{o.interval.low:.1%} to {o.interval.high:.1%}"
                chart.add_row(cell.scheme.name, bar, f"{o.success:.1%}", low_high, f"{o.chance:.1%}")
            yield chart


_HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>symbiosis-priv threat model</title>
<style>{stylesheet} body {{color: {foreground}; background: {background}}} pre {{font-family: monospace}}</style></head>
<body><pre>{code}</pre></body></html>
"""


def to_html(suite: Suite) -> str:
    """The report as one self-contained HTML page."""
    page = Console(record=True, file=io.StringIO(), width=_PAGE, force_terminal=True)
    state = "Every verdict is the promised one." if suite.as_expected else "Some verdicts are NOT as promised."
    page.print("Threat model: what each party learns\n", state, style="bold")
    for name, text in origin(suite).items():
        page.print(f"{name}: {text}", markup=False, highlight=False)
    show(suite, page)
    page.print(Group(*charts(suite)))
    attacks = [(a.name, a.party, a.sees, a.metric, a.chance, a.source) for a in suite.attacks]
    page.print(_table("Sources", ("attack", "by", "sees", "metric", "chance", "source"), attacks))
    return page.export_html(code_format=_HTML)
