"""Runs every attack against every scheme, and compares each verdict with the promised one.

The attack on routes runs in every mode of `experts = ...`, under `pad`, which hides every row. Routes stay visible, and
the table shows how much they reveal.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tenant import RemoteConfig, backend_of
from tenant.options import Experts
from threat_model.active.lying_providers import ActiveReport, attack_actively
from threat_model.attacks import ATTACKS, Attack, Outcome
from threat_model.attacks.tokens import TokensFromRoutes
from threat_model.evidence.schemes import NONE, PAD, PAD_RELAY, QUICK_SCHEMES, SCHEMES, AttackedScheme
from threat_model.evidence.truth import Truth, Witness
from threat_model.evidence.views import NO_NEIGHBOUR, Recorder, Views
from threat_model.lab import FULL, PLANTED, QUICK, Lab, Recording
from threat_model.planted import (
    bare_effect_faults,
    bare_effects,
    blind_to_companies,
    one_company_faults,
    plant,
    reused_pad_faults,
    reused_pads,
)

MODES: dict[Experts, bool] = {"all": True, "flat": True, "counts": False}
"""The modes that offload experts; True if a mode promises to hide decoded tokens."""

_EXPERTS = 8
_PROMPT = 8


@dataclass(frozen=True)
class RouteCell:
    """The attack on routes against one mode.

    Args:
        promised: True if the mode promises to hide decoded tokens.
    """

    mode: Experts
    promised: bool
    outcome: Outcome

    @property
    def expected(self) -> bool:
        """True if the attack finds something exactly where the mode promises nothing."""
        return self.outcome.broken != self.promised


def attack_routes(tokens: int) -> tuple[RouteCell, ...]:
    """Decode `tokens` tokens of one sequence in every mode, and attack what the executor saw."""
    attack = TokensFromRoutes()
    cells = []
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder), experts=_EXPERTS, helpers=1) as lab:
        for mode, promised in MODES.items():
            views, truth = record_decoding(lab, mode, tokens)
            guess = attack.run(views.executor, lab.public, torch.Generator().manual_seed(0))
            assert guess is not None  # one row is one token
            cells.append(RouteCell(mode, promised, attack.score(guess, truth)))
    return tuple(cells)


def record_decoding(lab: Lab, mode: Experts, tokens: int) -> tuple[Views, Truth]:
    """Decode one sequence of the tenant's text, sampled, and record it."""
    recorder, truth = Recorder(), Truth(steps=0)
    more: dict[str, Any] = {"show_routes_while_decoding": True} if mode == "counts" else {}
    config = RemoteConfig(
        federation=lab.federation_path,
        cache=lab.folder / "cache",
        masking="pad",
        experts=mode,
        wiretap=recorder,
        **more,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        lab.store.path, quantization_config=config, trust_remote_code=False
    )
    with backend_of(model):
        Witness.install(model, recorder, lab.public, truth)
        prompt = lab.private_windows(1, _PROMPT, seed=1)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=tokens + 1,
                min_new_tokens=tokens + 1,  # the last token is never sent
                do_sample=True,
                pad_token_id=lab.public.pad_token,
            )
    return recorder.views(NO_NEIGHBOUR), truth


OnProgress = Callable[[str, int, int], None]
"""Called with (next step, steps done, number of steps)."""


class Verdict(StrEnum):
    """The verdict of a cell of the table."""

    HIDDEN = "hidden"
    BROKEN = "broken"
    RESISTED = "resisted"
    BY_DESIGN = "by design"
    ABSENT = "nothing to see"


@dataclass(frozen=True)
class Cell:
    """One attack on one scheme.

    `promised`: the scheme claims to hide rows from the attack's party. `expected`: the verdict agrees with that claim
    (or with `Attack.decisive`).
    """

    attack: Attack[Any, Any]
    scheme: AttackedScheme
    outcome: Outcome | None
    verdict: Verdict
    promised: bool
    expected: bool
    seconds: float


@dataclass(frozen=True)
class PlantedCell:
    """One planted fault, and the verdict of its attack."""

    fault: str
    rule: str
    attack: str
    outcome: Outcome

    @property
    def found(self) -> bool:
        """True if chance cannot explain the success."""
        return self.outcome.broken


@dataclass(frozen=True)
class Suite:
    """All figures of a report."""

    quick: bool
    schemes: tuple[AttackedScheme, ...]
    cells: tuple[Cell, ...]
    planted: tuple[PlantedCell, ...]
    active: ActiveReport
    routes: tuple[RouteCell, ...]
    seconds: float

    @property
    def as_expected(self) -> bool:
        """True if every cell, fault and active attack had the expected result."""
        cells = all(c.expected for c in self.cells) and all(c.expected for c in self.routes)
        return cells and all(p.found for p in self.planted) and self.active.sound

    @property
    def outside(self) -> tuple[int, int]:
        """Number of promised cells whose 99 % interval misses chance, and number of promised cells. One in 100 is
        expected."""
        hidden = [c.outcome for c in self.cells if c.promised and c.outcome is not None and c.outcome.trials]
        return sum(not outcome.at_chance for outcome in hidden), len(hidden)

    def cell(self, attack: str, scheme: str) -> Cell:
        """The cell of an attack and a scheme."""
        return next(c for c in self.cells if c.attack.name == attack and c.scheme.name == scheme)


def run_suite(
    lab: Lab,
    *,
    quick: bool,
    attacks: Sequence[Attack[Any, Any]] = ATTACKS,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Suite:
    """Record every scheme, run every attack on it, plant every fault, and run every lie."""
    started = time.monotonic()
    schemes, workload = (QUICK_SCHEMES, QUICK) if quick else (SCHEMES, FULL)
    total = len(schemes) * (1 + len(attacks)) + 6
    done = 0

    def step(what: str) -> None:
        nonlocal done
        on_progress(what, done, total)
        done += 1

    cells: list[Cell] = []
    kept: dict[bool, Recording] = {}
    for scheme in schemes:
        step(f"{scheme.name}: fine-tuning and generating")
        recording = lab.record(scheme, workload)
        on_ring = recording.views.executor.exchanges[0].arithmetic == "ring"
        if scheme is NONE or not on_ring:
            kept.setdefault(on_ring, recording)
        for attack in attacks:
            step(f"{scheme.name}: {attack.name}")
            cells.append(examine(attack, recording, lab))
    step("planted faults")
    faults = plant(kept[True], kept[False], lab.public)
    with reused_pads():
        step("planted faults: a tenant that reuses pads")
        faults += reused_pad_faults(lab.record(PAD, PLANTED), lab.public)
    with bare_effects():
        step("planted faults: helpers that relay bare effects")
        faults += bare_effect_faults(lab.record(PAD_RELAY, PLANTED), lab.public)
    with blind_to_companies():
        step("planted faults: a tenant whose helper is of its executor's company")
        faults += one_company_faults(lab.record(PAD, PLANTED, federation=lab.one_company), lab.public)
    planted = tuple(PlantedCell(f.name, f.rule, f.attack.name, f.outcome()) for f in faults)
    step("active adversaries")
    active = attack_actively(lab, repeats=4 if quick else 24, rng=torch.Generator().manual_seed(5))
    step("routes of a mixture of experts")
    routes = attack_routes(60 if quick else 240)
    on_progress("done", total, total)
    return Suite(quick, tuple(schemes), tuple(cells), planted, active, routes, time.monotonic() - started)


def examine(attack: Attack[Any, Any], recording: Recording, lab: Lab) -> Cell:
    """Run one attack on its party's view, score it, and determine the verdict."""
    scheme, started = recording.scheme, time.monotonic()
    view = recording.views.of(attack.party)
    guess = attack.run(view, lab.public, torch.Generator().manual_seed(0))
    outcome = None if guess is None else attack.score(guess, recording.truth)
    promised = attack.party in scheme.hides_from and not attack.by_design
    verdict = _verdict(attack, scheme, outcome, promised=promised)
    expected = _is_expected(attack, scheme, verdict, promised=promised)
    return Cell(attack, scheme, outcome, verdict, promised, expected, time.monotonic() - started)


def _verdict(attack: Attack[Any, Any], scheme: AttackedScheme, outcome: Outcome | None, *, promised: bool) -> Verdict:
    if outcome is None:
        return Verdict.ABSENT
    if not outcome.broken:
        return Verdict.HIDDEN if promised else Verdict.RESISTED
    # the scheme hides rows from this party alone, but not from it together with others: its stated assumption
    assumed = "executor" in scheme.hides_from and attack.party == "executor+helper"
    return Verdict.BY_DESIGN if attack.by_design or (assumed and not promised) else Verdict.BROKEN


def _is_expected(attack: Attack[Any, Any], scheme: AttackedScheme, verdict: Verdict, *, promised: bool) -> bool:
    if promised:
        return verdict in (Verdict.HIDDEN, Verdict.ABSENT)
    if attack.by_design:
        return verdict is Verdict.BY_DESIGN
    if attack.decisive and (scheme.helpers or "helper" not in attack.party):
        return verdict in (Verdict.BROKEN, Verdict.BY_DESIGN)
    return True
