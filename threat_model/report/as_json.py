"""A suite's figures as JSON."""

import json
from dataclasses import asdict
from typing import Any

from threat_model.attacks import Outcome
from threat_model.evidence.statistics import CONFIDENCE, gaussian_channel_bits
from threat_model.report.sections import noise_scales
from threat_model.report.security_table import NOT_HIDDEN
from threat_model.suite import Cell, Suite


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
