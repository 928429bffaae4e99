"""Runs every attack against every scheme, and compares each verdict with the promised one."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from symbiosis_priv.arithmetic.ring import FORWARD
from tenant.endpoint.engine.requests import AHEAD
from threat_model.active.disk_image import attack_machine
from threat_model.active.lattice_masks import ROWS, play_masks
from threat_model.active.lying_providers import attack_actively
from threat_model.attacks import ATTACKS, Attack, Outcome
from threat_model.attacks.base import Trial, counted
from threat_model.attacks.collusion import Collusion
from threat_model.attacks.reused_noise import RepeatedRows
from threat_model.attacks.statistics_of_masks import Distinguisher, Uniformity
from threat_model.attacks.topics import TopicsOfChats, uneven
from threat_model.evidence.chats import Chat, chats
from threat_model.evidence.schemes import NONE, PAD, QUICK_SCHEMES, SCHEMES, AttackedScheme
from threat_model.lab import FULL, PLANTED, QUICK, Lab, Recording, Workload
from threat_model.planted import plant


@dataclass(frozen=True)
class Section:
    """A table of trials. `headings` are those of their labels."""

    title: str
    headings: tuple[str, ...]
    trials: tuple[Trial, ...]


SCALE, QUICK_SCALE = 8, 16
"""Lengths of chats and buckets are divided by this number where rows are computed, so that it takes minutes."""

_BUCKET, _PACE_S = 32, 0.05


def attack_topics(lab: Lab, *, quick: bool) -> tuple[list[Trial], Trial]:
    """Answer SmolLM2's chats through the endpoint's engine with some options of `tenant serve`, and attack what the
    executor saw; and plant a bucket that one request ignores. Where no rows are computed there are no times, and
    elsewhere lengths are divided by `SCALE`. The order of chats is random, so that no class has its own time."""
    every = chats()
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(ATTACK_SEED)).tolist()
    every = [every[i] for i in order]
    scale = QUICK_SCALE if quick else SCALE
    short = [chat._replace(prompt=-(-chat.prompt // scale), answer=-(-chat.answer // scale)) for chat in every]
    short, bucket = short[: 32 if quick else 96], _BUCKET // scale
    named = f"--answer-bucket {_BUCKET}"
    found = []

    def attack(options: str, asked: list[Chat], *, rows: int = 1, must_find: bool | None = None, **said: Any) -> None:
        traces = lab.record_chats(asked, **said)
        about = options or "none", f"counts and times, lengths / {scale}" if said.get("computes", True) else "counts"
        for guessed in ("language", "topic"):
            names = [getattr(chat, guessed) for chat in asked]
            labels = torch.tensor([sorted(set(names)).index(name) for name in names])
            found.append(Trial((*about, guessed), must_find, TopicsOfChats().run(traces, labels)))
        if must_find is False:
            wrong = sum({step.rows for step in trace} != {rows} for trace in traces)
        else:
            wrong = uneven(traces, bucket=said.get("bucket", 1), rows=rows)
        found.append(counted((*about, "answers outside their bucket"), wrong, len(traces)))

    attack("", every, must_find=True, computes=False)
    attack(named, every[:96] if quick else every, bucket=_BUCKET, computes=False)
    attack("", short)
    attack(f"{named} --draft", short, bucket=bucket, ahead=AHEAD, rows=1 + AHEAD)
    attack(f"{named} --pace", short, bucket=bucket, pace_s=_PACE_S, rows=bucket, must_find=False)
    few = [*short[:8], short[0]._replace(answer=bucket + 1)]
    wrong = uneven(lab.record_chats(few, bucket=bucket, forgets=8), bucket=bucket, rows=1)
    planted = "one request ignores its bucket", "rule 9", TopicsOfChats.name
    return found, counted(planted, wrong, len(few), must_find=True)


ATTACK_SEED, LIES_SEED = 0, 5
"""What attacks and lies choose is the same in every run. Keys, masks and coins are not."""

OnProgress = Callable[[str, int, int], None]
"""Called with (next step, steps done, number of steps)."""


class Verdict(StrEnum):
    HIDDEN = "hidden"
    BROKEN = "broken"
    RESISTED = "resisted"
    BY_DESIGN = "by design"
    ABSENT = "nothing to see"


@dataclass(frozen=True)
class Cell:
    """One attack on one scheme. `promised`: the scheme claims to hide rows from the attack's party. `expected`: the
    attack finds something where it must, and nothing where it must not."""

    attack: Attack[Any, Any]
    scheme: AttackedScheme
    outcome: Outcome | None
    verdict: Verdict

    @property
    def promised(self) -> bool:
        return must_find(self.attack, self.scheme) is False

    @property
    def expected(self) -> bool:
        return must_find(self.attack, self.scheme) in (None, self.outcome is not None and self.outcome.broken)


@dataclass(frozen=True)
class Suite:
    """The results of a run. `seed` is that of the tenant's work, `began` the time in UTC."""

    quick: bool
    schemes: tuple[AttackedScheme, ...]
    cells: tuple[Cell, ...]
    sections: tuple[Section, ...]
    seed: int
    began: datetime
    seconds: float

    @property
    def unexpected(self) -> list[str]:
        """The cells, faults and active attacks that did not have the expected result, in words."""
        wrong = [f"{c.attack.name} on {c.scheme.name}: {c.verdict}" for c in self.cells if not c.expected]
        found = ((section.title, trial) for section in self.sections for trial in section.trials)
        return wrong + [f"{title}: {', '.join(trial.labels)}" for title, trial in found if not trial.expected]

    @property
    def as_expected(self) -> bool:
        return not self.unexpected

    def trials(self, section: str) -> tuple[Trial, ...]:
        """The trials of the section whose title begins like this."""
        return next(one.trials for one in self.sections if one.title.startswith(section))

    @property
    def outside(self) -> tuple[int, int]:
        """Number of promised cells whose 99 % interval misses chance (expected: 1 in 100), and of promised cells."""
        hidden = [c.outcome for c in self.cells if c.promised and c.outcome is not None and c.outcome.trials]
        return sum(not outcome.at_chance for outcome in hidden), len(hidden)

    @property
    def attacks(self) -> tuple[Attack[Any, Any], ...]:
        """Every attack, in the order of the report."""
        return tuple(dict.fromkeys(c.attack for c in self.cells))

    def cell(self, attack: str, scheme: str) -> Cell:
        return next(c for c in self.cells if c.attack.name == attack and c.scheme.name == scheme)


def run_suite(
    lab: Lab,
    *,
    quick: bool,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Suite:
    """Record every scheme, run every attack on it, plant every fault, and run every lie."""
    started, began = time.monotonic(), datetime.now(UTC)
    schemes, workload = (QUICK_SCHEMES, QUICK) if quick else (SCHEMES, FULL)
    total = len(schemes) * (1 + len(ATTACKS)) + 12
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
        for attack in ATTACKS:
            step(f"{scheme.name}: {attack.name}")
            cells.append(examine(attack, recording, lab))
    planted = plant(lab, kept[True], kept[False], step)
    step("active adversaries")
    lies, aborts = attack_actively(lab, repeats=4 if quick else 24, rng=torch.Generator().manual_seed(LIES_SEED))
    step("masks of lwe on chosen rows")
    masks = tuple(play_masks(ROWS // 10 if quick else ROWS))
    step("composed groups")
    composed = tuple(attack_composed(PLANTED if quick else FULL))
    step("topics and languages of chats")
    topics, forgotten = attack_topics(lab, quick=quick)
    step("the tenant's machine")
    machine = tuple(attack_machine(lab))
    on_progress("done", total, total)
    asked = "options of tenant serve", "sees", "guessed"
    sections = (
        Section("Planted faults", ("fault", "breaks", "attack"), (*planted, forgotten)),
        Section("Masks of lwe: which of two chosen rows was masked", ("attack", "planted fault"), masks),
        Section("Active adversaries: lies that the tenant accepts", ("lie",), tuple(lies)),
        Section("Selective aborts: signs of products from aborts", ("tenant",), tuple(aborts)),
        Section("Two round trips per block: rows of composed groups", ("masking", "attack"), composed),
        Section("Topics and languages of SmolLM2's chats", asked, tuple(topics)),
        Section("The tenant's machine", ("adversary", "planted fault", "tries", "finds"), machine),
    )
    return Suite(quick, schemes, tuple(cells), sections, workload.seed, began, time.monotonic() - started)


def must_find(attack: Attack[Any, Any], scheme: AttackedScheme) -> bool | None:
    """False if the scheme promises to hide rows from the attack's party; True if the attack has to succeed."""
    if attack.party in scheme.hides_from and not attack.by_design:
        return False
    if attack.by_design or (attack.decisive and (scheme.helpers or "helper" not in attack.party)):
        return True
    return None


def examine(attack: Attack[Any, Any], recording: Recording, lab: Lab) -> Cell:
    """Run one attack on its party's view, score it, and determine the verdict."""
    scheme = recording.scheme
    view = recording.views.of(attack.party)
    guess = attack.run(view, lab.public, torch.Generator().manual_seed(ATTACK_SEED))
    outcome = None if guess is None else attack.score(guess, recording.truth)
    promised = must_find(attack, scheme) is False
    # the scheme hides rows from this party alone, but not from it together with others: its stated assumption
    assumed = "executor" in scheme.hides_from and attack.party == "executor+helper" and not promised
    if outcome is None:
        verdict = Verdict.ABSENT
    elif outcome.broken:
        verdict = Verdict.BY_DESIGN if attack.by_design or assumed else Verdict.BROKEN
    else:
        verdict = Verdict.HIDDEN if promised else Verdict.RESISTED
    return Cell(attack, scheme, outcome, verdict)


def attack_composed(workload: Workload) -> Iterator[Trial]:
    """Attack composed groups, which leave in pairs (`round_trips = 2`): bare and masked."""
    attacks: list[Attack[Any, Any]] = [RepeatedRows(FORWARD), Uniformity(), Distinguisher(FORWARD), Collusion(FORWARD)]
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder), helpers=1, round_trips=2) as lab:
        composed = {i for i, entry in enumerate(lab.public.manifest.groups) if entry.composed is not None}
        for scheme in (NONE, PAD):
            recording = lab.record(scheme, workload)
            assert composed <= {exchange.group for exchange in recording.views.executor.exchanges}
            for attack in attacks:
                if (outcome := examine(attack, recording, lab).outcome) is not None:
                    yield Trial((scheme.name, attack.name), must_find(attack, scheme), outcome)
