"""The contents of a report in every format: rows of text and figures, without a layout."""

from threat_model.evidence.statistics import CONFIDENCE, FALSE_ALARM
from threat_model.evidence.views import PARTIES
from threat_model.routes import RouteCell
from threat_model.suite import Cell, PlantedCell, Suite, Verdict

MARKS = {
    Verdict.HIDDEN: "✓",
    Verdict.BROKEN: "✗",
    Verdict.RESISTED: "~",
    Verdict.BY_DESIGN: "○",
    Verdict.ABSENT: "–",
}


def interval_note(suite: Suite) -> str:
    outside, promised = suite.outside
    return (
        f"{promised} cells are promised to be hidden. In {outside} of them chance lies outside the cell's own "
        f"{CONFIDENCE:.0%} interval; {promised * (1 - CONFIDENCE):.1f} are expected to, by chance. A cell counts as "
        f"broken only if chance alone does as well less than once in {1 / FALSE_ALARM:,.0f} times."
    )


SUMMARY = ("scheme", "hides rows from", "their attacks that fail", "attacks of others that succeed", "as promised")


def summary_rows(suite: Suite) -> list[tuple[str, ...]]:
    """The summary, one row per scheme."""
    rows: list[tuple[str, ...]] = []
    needs = {"helper": 1, "executor+helper": 1, "all but a helper": 2}
    for scheme in suite.schemes:
        cells = [c for c in suite.cells if c.scheme is scheme]
        held = [c for c in cells if c.promised and c.verdict is not Verdict.ABSENT]
        fell = [c for c in cells if not c.promised and not c.attack.by_design and c.outcome and c.outcome.broken]
        by: dict[str, int] = {}
        for cell in fell:
            by[cell.attack.party] = by.get(cell.attack.party, 0) + 1
        rows.append(
            (
                scheme.name,
                ", ".join(p for p in PARTIES if p in scheme.hides_from and scheme.helpers >= needs.get(p, 0)),
                f"{sum(c.verdict is Verdict.HIDDEN for c in held)} of {len(held)}",
                ", ".join(f"{count} by {party}" for party, count in by.items()) or "none",
                "yes" if all(c.expected for c in cells) else "NO",
            )
        )
    return rows


def planted_row(fault: PlantedCell) -> tuple[str, ...]:
    rates = (f"{rate:.1%}" for rate in (fault.outcome.success, fault.outcome.chance))
    return fault.fault, fault.rule, fault.attack, *rates, "yes" if fault.found else "NO"


ROUTES = ("experts", "success", "chance", "99 % interval", "promised", "as promised")


def route_row(cell: RouteCell) -> tuple[str, ...]:
    """Tokens recovered from the routes of one mode."""
    outcome, interval = cell.outcome, cell.outcome.interval
    rates = f"{outcome.success:.0%}", f"{outcome.chance:.0%}", f"{interval.low:.0%} to {interval.high:.0%}"
    return cell.mode, *rates, "hidden" if cell.promised else "nothing", "yes" if cell.expected else "NO"


def pool_cells(suite: Suite, attack: str) -> list[Cell]:
    return [
        c
        for c in suite.cells
        if c.attack.name == attack and "masking_options" in c.scheme.options and c.outcome is not None
    ]


def noise_scales(suite: Suite) -> list[float]:
    options = [s.options for s in suite.schemes]
    return sorted({float(o["masking_options"]["noise_scale"]) for o in options if "masking_options" in o})
