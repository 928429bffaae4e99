"""A suite's figures: tables in a terminal, and one HTML page with pictures."""

import itertools
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

import symbiosis_priv
from symbiosis_priv.display import figures
from symbiosis_priv.display.figures import Bar
from threat_model.attacks import Attack, Outcome
from threat_model.evidence.schemes import AttackedScheme
from threat_model.evidence.statistics import CONFIDENCE, FALSE_ALARM
from threat_model.evidence.views import PARTIES, Party
from threat_model.suite import ATTACK_SEED, LIES_SEED, QUICK_SCALE, SCALE, Cell, Suite, Verdict

NOT_HIDDEN = [
    (one["what"], one["shown_by"])
    for one in tomllib.loads(Path(__file__).with_name("not_hidden.toml").read_text(encoding="utf-8"))["not_hidden"]
]
"""Pairs of (what is not hidden, the attack that shows it)."""


# mark, style in a terminal, colour of a picture; the style sheet below has the colours of cells
_LOOKS = {
    Verdict.HIDDEN: ("✓", "green", "#15803d"),
    Verdict.BROKEN: ("✗", "red", "#b91c1c"),
    Verdict.RESISTED: ("~", "yellow", "#a16207"),
    Verdict.BY_DESIGN: ("○", "cyan", "#0e7490"),
    Verdict.ABSENT: ("–", "dim", "#777"),
}


@dataclass(frozen=True)
class Section:
    """A table of a report. A row whose last cell is "NO" is not as promised."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


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


def interval_note(suite: Suite) -> str:
    outside, promised = suite.outside
    return (
        f"{promised} cells are promised to be hidden. In {outside} of them chance lies outside the cell's own "
        f"{CONFIDENCE:.0%} interval; {promised * (1 - CONFIDENCE):.1f} are expected to, by chance. A cell counts as "
        f"broken only if chance alone does as well less than once in {1 / FALSE_ALARM:,.0f} times."
    )


def summary(suite: Suite) -> Section:
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
    return Section("Summary", headings, rows)


def last_sections(suite: Suite) -> list[Section]:
    """The tables after those of the attacks on schemes."""
    errors = [d for d in suite.active.detections if d.valuation is not None]
    others = [d for d in suite.active.detections if d.valuation is None]
    caught, worst = sum(d.caught for d in errors), min(d.caught / d.trials for d in errors)
    summed = f"{caught} of {sum(d.trials for d in errors)}", f"worst valuation {worst:.0%}"
    lies = [("errors of valuation 0..31", *summed)]
    for d in others:  # a check that involves no chance says the same each time, so there is no rate to estimate
        rate = f"{d.interval.low:.1%}" if d.trials > 1 else "always: no chance is involved"
        lies.append((d.name, f"{d.caught} of {d.trials}", rate if d.caught == d.trials else "NO"))
    leaks = [(x.name, f"{x.aborts} of {x.trials}", f"{x.information:.3f}") for x in suite.active.leaks]
    planted = [
        (p.fault, p.rule, p.attack, f"{p.outcome.success:.1%}", f"{p.outcome.chance:.1%}", _yes(p.found))
        for p in suite.planted
    ]
    masks = [
        (
            g.attack,
            g.fault or "none",
            f"{2 * g.outcome.trials:,}",
            f"{g.outcome.success:.1%}",
            "50.0%",
            _yes(g.expected),
        )
        for g in suite.masks
    ]
    measured = "success", "chance", "99 % interval"
    about_topics = ("options of tenant serve", "sees", "guessed", *measured, "chats", "promised", "as promised")
    topics = []
    for one in suite.topics:
        outcome, interval = one.outcome, one.outcome.interval
        rates = f"{outcome.success:.0%}", f"{outcome.chance:.0%}", f"{interval.low:.0%} to {interval.high:.0%}"
        promise = "hidden" if one.promised else "coarser" if one.options else "nothing"
        sees = f"counts and times, lengths / {QUICK_SCALE if suite.quick else SCALE}" if one.computed else "counts"
        about = one.options or "none", sees, one.guessed
        topics.append((*about, *rates, f"{outcome.trials}", promise, _yes(one.expected)))
    machine = [
        (c.adversary, c.fault or "none", c.tries, ", ".join(c.found) or "nothing", _yes(c.expected))
        for c in suite.machine
    ]
    about_composed = ("masking", "attack", "success", "chance", "verdict", "as promised")
    composed = [
        (c.scheme.name, c.attack.name, f"{o.success:.1%}", f"{o.chance:.1%}", c.verdict, _yes(c.expected))
        for c in suite.composed
        if (o := c.outcome) is not None
    ]
    return [
        Section("Planted faults", ("fault", "breaks", "attack", "success", "chance", "found"), planted),
        Section(
            "Masks of lwe: which of two chosen rows was masked",
            ("attack", "planted fault", "rows", "success", "chance", "as promised"),
            masks,
        ),
        Section("Active adversaries", ("lie", "caught", "rate, at least (99 %)"), lies),
        Section("Selective aborts", ("tenant", "aborted", "bits learned about one secret bit"), leaks),
        Section("Two round trips per block: rows of composed groups", about_composed, composed),
        Section("Topics and languages of SmolLM2's chats", about_topics, topics),
        Section("The tenant's machine", ("adversary", "planted fault", "tries", "finds", "as promised"), machine),
        Section("Not hidden, by any scheme", ("what", "shown by"), NOT_HIDDEN),
    ]


def pool_outcomes(suite: Suite, attack: str) -> list[tuple[AttackedScheme, Outcome]]:
    """The outcomes of an attack on the paper's pools of noise."""
    cells = [c for c in suite.cells if c.attack.name == attack and "masking_options" in c.scheme.options]
    return [(c.scheme, c.outcome) for c in cells if c.outcome is not None]


def _by_party(suite: Suite) -> Iterator[tuple[Party, list[Attack[Any, Any]]]]:
    for party in dict.fromkeys(a.party for a in suite.attacks):
        yield party, [a for a in suite.attacks if a.party == party]


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


_FULL, _SHORT = 17, 10  # columns of a scheme, with and without the chance level


def show(suite: Suite, console: Console) -> None:
    """Print the tables. A narrow terminal does not show the chance level."""
    room = console.width - 4 - max(len(c.attack.name) for c in suite.cells)
    full = room // _FULL >= min(6, len(suite.schemes))
    beside = max(1, room // (_FULL if full else _SHORT))
    parts: list[RenderableType] = []

    def text_of(cell: Cell) -> Text:
        mark, style, _ = _LOOKS[cell.verdict]
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
        for party, attacks in _by_party(suite):
            table.add_section()
            table.add_row(Text(f"by {party}", style="bold"))
            for attack in attacks:
                table.add_row(attack.name, *(text_of(suite.cell(attack.name, s.name)) for s in schemes))
        parts.append(table)
    legend = ", ".join(f"{mark} {verdict}" for verdict, (mark, _, _) in _LOOKS.items())
    costs = []
    for scheme, outcome in pool_outcomes(suite, "candidate subtraction, forward"):
        f = outcome.figures
        tried, counted = f"{f['distances tried']:,.0f}", f"10^{f['combinations, log10']:.0f}"
        costs.append((scheme.name, tried, counted, f"{f['worst layer']:.1%}"))
    headings = ("scheme", "distances tried", "combinations the paper counts", "rows read, worst layer")
    parts += [
        Text(f"{'success | chance' if full else 'success'}, in %. {legend}; ! not as promised", style="dim"),
        _table(summary(suite)),
        Text(interval_note(suite), style="dim"),
        _table(Section("What candidate subtraction costs: each layer on its own", headings, costs)),
        *map(_table, last_sections(suite)),
    ]
    console.print(Group(*parts))


def _table(section: Section) -> Table:
    table = Table(*section.headings, title=section.title, title_justify="left")
    for row in section.rows:
        table.add_row(*row, style="bold red" if row[-1] == "NO" else None)
    return table


def attack_charts(suite: Suite) -> list[str]:
    charts = []
    for attack in suite.attacks:
        values = []
        for c in suite.cells:
            if c.attack is attack and (o := c.outcome):
                ends = o.interval.low, o.interval.high
                values.append(Bar(c.scheme.name, o.success, *ends, o.chance, _LOOKS[c.verdict][2]))
        if len(values) > 1:
            charts.append(figures.bars(f"{attack.name}: {attack.metric}", values, "success"))
    return charts


def to_html(suite: Suite) -> str:
    """The report as one self-contained HTML page. Pictures are inline SVG."""
    state = "Every verdict is the promised one." if suite.as_expected else "Some verdicts are NOT as promised."
    kind = "hidden" if suite.as_expected else "broken"
    attacks = [(a.name, a.party, a.sees, a.metric, a.chance, a.source) for a in suite.attacks]
    sections = [
        "<h1>Threat model: what each party learns</h1>",
        f'<p class="state {kind}"><strong>{state}</strong></p>',
        f"<p>{'<br>'.join(f'{escape(name)}: {escape(text)}' for name, text in origin(suite).items())}</p>",
        _html_table(summary(suite)),
        f"<p><small>{escape(interval_note(suite))}</small></p>",
        "<h2>Attacks against masking schemes</h2>",
        _html_cells(suite),
        _pictures(
            "<h2>Every attack</h2><p><small>Whiskers: 99 % interval; dashes: chance.</small></p>", attack_charts(suite)
        ),
        *(f"<h2>{escape(s.title)}</h2>{_html_table(s)}" for s in last_sections(suite)),
        "<h2>Attacks and their sources</h2>",
        _html_table(Section("", ("attack", "by", "sees", "metric", "chance", "source"), attacks)),
    ]
    titles = re.findall("<h2>(.*?)</h2>", "".join(sections))
    numbers = itertools.count()
    body = re.sub("<h2>", lambda _: f'<h2 id="s{next(numbers)}">', "".join(sections[3:]))
    contents = "".join(f'<li><a href="#s{number}">{title}</a></li>' for number, title in enumerate(titles))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>symbiosis-priv threat model</title>'
        f"<style>{Path(__file__).with_name('report.css').read_text(encoding='utf-8')}</style></head><body>{''.join(sections[:3])}"
        f'<nav aria-label="Contents"><ol>{contents}</ol></nav>{body}</body></html>'
    )


def _pictures(heading: str, charts: Sequence[str]) -> str:
    """A heading and its charts; nothing without charts."""
    shown = "".join(f"<figure>{chart}</figure>" for chart in charts)
    return f'{heading}<div class="pictures">{shown}</div>' if charts else ""


def _html_table(section: Section) -> str:
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in section.rows]
    return _html_rows(section.headings, rows)


def _html_rows(headings: Sequence[str], rows: Sequence[str], kind: str = "") -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    return f'<table class="{kind}"><tr>{head}</tr>{"".join(f"<tr>{row}</tr>" for row in rows)}</table>'


def _html_cells(suite: Suite) -> str:
    css = {verdict: verdict.name.lower().replace("_", "-") for verdict in _LOOKS}
    rows = []
    for party, attacks in _by_party(suite):
        rows.append(f'<td class="party" colspan="{len(suite.schemes) + 1}">by {party}</td>')
        for attack in attacks:
            row = f"<td>{escape(attack.name)}</td>"
            for cell in (suite.cell(attack.name, scheme.name) for scheme in suite.schemes):
                kind = css[cell.verdict] + ("" if cell.expected else " alarm")
                o, mark = cell.outcome, _LOOKS[cell.verdict][0]
                text = mark if o is None else f"{o.success:.1%} {mark}<br><small>chance {o.chance:.1%}</small>"
                row += f'<td class="{kind}" title="{cell.verdict}">{text}</td>'
            rows.append(row)
    legend = "".join(f'<span class="{css[verdict]}">{look[0]} {verdict}</span>' for verdict, look in _LOOKS.items())
    table = _html_rows(["attack", *(s.name for s in suite.schemes)], rows, "cells")
    return (
        f'<p class="legend">{legend}<small>success, and what chance would score</small></p>'
        f'<div class="wide">{table}</div>'
    )
