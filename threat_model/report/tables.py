"""The tables of a report as rows of text, in a terminal and as JSON, and the security table of the README."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from threat_model.attacks import Outcome
from threat_model.evidence.schemes import SCHEMES, AttackedScheme
from threat_model.evidence.statistics import CONFIDENCE, FALSE_ALARM, gaussian_channel_bits
from threat_model.evidence.views import PARTIES, Party
from threat_model.suite import Cell, Suite, Verdict

BEGIN, END = "<!-- security-table:begin -->", "<!-- security-table:end -->"

_PARTIES: tuple[tuple[Party, str], ...] = (
    ("executor", "executor"),
    ("helper", "helper"),
    ("executor+helper", "executor and helpers together"),
    ("network", "network, other tenants"),
)

NOT_HIDDEN: tuple[tuple[str, str], ...] = (
    ("The number of rows of a request: batch x tokens, prompt length, sequences in a batch", "shapes, executor"),
    ("Layer and direction: training can be distinguished from generation, and its steps counted", "shapes, executor"),
    ("When generation ends: the number of generated tokens", "shapes, executor"),
    (
        "Which experts rows go to, with `experts = 'counts'`: a decoded token's route tells the token",
        "tokens from routes",
    ),
    (
        "With `ring_bits = 24`: that some rows are sent again, because more than two outputs of each were extreme "
        "(10 rows of 10^6 in the training of a real model, none in its generation)",
        "shapes, executor",
    ),
    ("The same for an observer of the network, from frame sizes and times", "sizes, network"),
    ("That a provider is busy with others: it answers later (its health report counts nobody else's)", "timing"),
    ("The tenant's identity (its certificate), the base model and the providers", "by protocol: mutual TLS, Hello"),
    ("Every row, also in retrospect, if the executor and all helpers combine their logs (`pad`)", "collusion"),
    (
        "That a wrong answer was noticed: the session goes elsewhere or ends (a constant, it depends on no secret)",
        "active adversaries",
    ),
    ("What the tenant publishes: an adapter or a generated text carries what it was trained on", "out of scope"),
)
"""Pairs of (what is hidden, the attack that shows it)."""


def security_table() -> str:
    """Markdown with one row per scheme: what each party learns about rows, and under which assumption."""
    families: dict[str, AttackedScheme] = {}
    for scheme in SCHEMES:
        families.setdefault(scheme.family, scheme)
    lines = [
        "| masking | " + " | ".join(label for _, label in _PARTIES) + " | rests on | results |",
        "|" + "---|" * (len(_PARTIES) + 3),
    ]
    # the scheme that promises most is first
    for name, scheme in sorted(families.items(), key=lambda item: (-len(item[1].hides_from), item[0])):
        cells = [_cell(scheme, party) for party, _ in _PARTIES]
        masking = scheme.masking
        results = f"{masking.error or 'bit-exact'}, {'verified' if masking.verified else 'not verified'}"
        lines.append(f"| `{name}` | " + " | ".join(cells) + f" | {masking.assumption} | {results} |")
    lines += [
        "",
        "Row counts, stage and timing are visible under every scheme. `symbiosis-priv threat-model` attacks each cell "
        "and fails if one of them is wrong.",
    ]
    return "\n".join(lines)


def _cell(scheme: AttackedScheme, party: Party) -> str:
    if "helper" in party and not scheme.helpers:
        return "no helper"
    return "hidden" if party in scheme.hides_from else "**reads rows**"


MARKS = {
    Verdict.HIDDEN: "✓",
    Verdict.BROKEN: "✗",
    Verdict.RESISTED: "~",
    Verdict.BY_DESIGN: "○",
    Verdict.ABSENT: "–",
}


@dataclass(frozen=True)
class Section:
    """A table of a report. A row whose last cell is "NO" is not as promised."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


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
    return Section("Summary", headings, rows)


def last_sections(suite: Suite) -> list[Section]:
    """The tables after those of the attacks on schemes."""
    errors = [d for d in suite.active.detections if d.valuation is not None]
    others = [d for d in suite.active.detections if d.valuation is None]
    caught, worst = sum(d.caught for d in errors), min(d.caught / d.trials for d in errors)
    lies = [
        ("errors of valuation 0..31", f"{caught} of {sum(d.trials for d in errors)}", f"worst valuation {worst:.0%}")
    ]
    lies += [(d.name, f"{d.caught} of {d.trials}", f"{d.interval.low:.1%}") for d in others]
    leaks = [(x.name, f"{x.aborts} of {x.trials}", f"{x.information:.3f}") for x in suite.active.leaks]
    planted = [
        (p.fault, p.rule, p.attack, f"{p.outcome.success:.1%}", f"{p.outcome.chance:.1%}", _yes(p.found))
        for p in suite.planted
    ]
    routes = []
    for cell in suite.routes:
        outcome, interval = cell.outcome, cell.outcome.interval
        rates = f"{outcome.success:.0%}", f"{outcome.chance:.0%}", f"{interval.low:.0%} to {interval.high:.0%}"
        routes.append((cell.mode, *rates, "hidden" if cell.promised else "nothing", _yes(cell.expected)))
    return [
        Section("Planted faults", ("fault", "breaks", "attack", "success", "chance", "found"), planted),
        Section("Active adversaries", ("lie", "caught", "at least (99 %)"), lies),
        Section("Selective aborts", ("tenant", "aborted", "bits learned about one secret bit"), leaks),
        Section(
            "Mixture of experts: decoded tokens from routes",
            ("experts", "success", "chance", "99 % interval", "promised", "as promised"),
            routes,
        ),
        Section("Not hidden, by any scheme", ("what", "shown by"), NOT_HIDDEN),
    ]


def pool_cells(suite: Suite, attack: str) -> list[Cell]:
    return [
        c
        for c in suite.cells
        if c.attack.name == attack and "masking_options" in c.scheme.options and c.outcome is not None
    ]


def noise_scales(suite: Suite) -> list[float]:
    options = [s.options for s in suite.schemes]
    return sorted({float(o["masking_options"]["noise_scale"]) for o in options if "masking_options" in o})


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


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


def to_json(suite: Suite) -> str:
    """The report as JSON, with every figure."""
    outside, promised = suite.outside
    data = {
        "version": 1,
        "quick": suite.quick,
        "seconds": round(suite.seconds, 1),
        "as_expected": suite.as_expected,
        "confidence": CONFIDENCE,
        "promised_cells": promised,
        "promised_cells_outside_their_interval": outside,
        "cells": [_cell_json(c) for c in suite.cells],
        "planted": [
            {"fault": p.fault, "rule": p.rule, "attack": p.attack, "success": p.outcome.success, "found": p.found}
            for p in suite.planted
        ],
        "active": {
            "detections": [asdict(d) for d in suite.active.detections],
            "aborts": [asdict(x) for x in suite.active.leaks],
            "forgeries": [{**asdict(f), "theory": f.theory} for f in suite.active.forgeries],
        },
        "routes": [
            {"mode": c.mode, "promised": c.promised, "expected": c.expected, **_outcome_json(c.outcome)}
            for c in suite.routes
        ],
        "gaussian_bits_per_coordinate": {f"{s:g}": gaussian_channel_bits(s) for s in noise_scales(suite)},
        "not_hidden": [{"what": what, "shown_by": attack} for what, attack in NOT_HIDDEN],
    }
    return json.dumps(data, indent=1)


def _cell_json(cell: Cell) -> dict[str, Any]:
    result: dict[str, Any] = {
        "attack": cell.attack.name,
        "party": cell.attack.party,
        "metric": cell.attack.metric,
        "scheme": cell.scheme.name,
        "verdict": cell.verdict,
        "promised": cell.promised,
        "expected": cell.expected,
        "seconds": round(cell.seconds, 3),
    }
    return result if cell.outcome is None else result | _outcome_json(cell.outcome)


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "success": outcome.success,
        "trials": outcome.trials,
        "chance": outcome.chance,
        "interval": [outcome.interval.low, outcome.interval.high],
        "p_value": outcome.p_value,
        "figures": dict(outcome.figures),
    }
