"""The tables of a report as rows of text. Each format lays them out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from threat_model.evidence.statistics import CONFIDENCE, FALSE_ALARM
from threat_model.evidence.views import PARTIES
from threat_model.report.security_table import NOT_HIDDEN
from threat_model.suite import Cell, Suite, Verdict

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
