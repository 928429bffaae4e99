"""Attacks succeed where they must, and are at chance where rows are hidden."""

from __future__ import annotations

import html
import html.parser
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from symbiosis_priv import __version__
from symbiosis_priv.arithmetic.keystream import SEED_BYTES
from symbiosis_priv.arithmetic.ring import DIRECTIONS
from threat_model.attacks import ATTACKS, Outcome
from threat_model.attacks.collusion import Coalition, Collusion
from threat_model.attacks.recorded_links import Harvest
from threat_model.attacks.reused_noise import CandidateSubtraction
from threat_model.attacks.tokens import BlockLabels, HeadLabels
from threat_model.attacks.topics import TopicsOfChats, uneven
from threat_model.conformance.properties import PROPERTIES
from threat_model.evidence.chats import Step
from threat_model.evidence.schemes import (
    LOCAL,
    NONE,
    PAD,
    PAD_24,
    PADS,
    PADS_3,
    QUICK_SCHEMES,
    SCHEMES,
    AttackedScheme,
    paper_pool,
)
from threat_model.evidence.statistics import FALSE_ALARM
from threat_model.evidence.views import CollusionView, HelperView, Party, RecorderView
from threat_model.lab import PLANTED, QUICK, Lab
from threat_model.planted import score
from threat_model.report import charts, origin, sections, summary
from threat_model.suite import Suite, Verdict, examine

if TYPE_CHECKING:
    from tests.threat_model.conftest import Recorded

SMALL = PLANTED
# 1,152 gradients a layer: about one in a thousand fits another noise row better if noise is as small as rows
LARGER = replace(SMALL, batch=24)


def outcome_of(suite: Suite, attack: str, scheme: str) -> Outcome:
    outcome = suite.cell(attack, scheme).outcome
    assert outcome is not None
    return outcome


READABLE = [s.name for s in QUICK_SCHEMES if s.family in ("none", "paper-pool")]


@pytest.mark.parametrize("scheme", READABLE)
def test_rows_text_and_adapter_are_read_without_masking(quick: Suite, scheme: str) -> None:
    for direction in ("forward", "backward"):
        outcome = outcome_of(quick, f"candidate subtraction, {direction}", scheme)
        assert outcome.figures["worst layer"] >= 0.99
    assert outcome_of(quick, "tokens, first layer", scheme).success >= 0.99
    assert outcome_of(quick, "labels from head gradients", scheme).success >= 0.99
    adapter = outcome_of(quick, "adapter by least squares", scheme)
    assert adapter.success == 1.0
    assert adapter.figures["worst relative error"] <= 0.01


@pytest.mark.parametrize("scheme", [PAD, PADS, PAD_24, LOCAL], ids=lambda s: s.name)
def test_every_attack_by_one_party_is_at_chance(quick: Suite, scheme: AttackedScheme) -> None:
    # Each interval has 99 % confidence, so about one in a hundred misses by chance. A failure here has probability
    # 1e-8.
    for cell in quick.cells:
        if cell.scheme is scheme and cell.promised:
            assert cell.verdict in (Verdict.HIDDEN, Verdict.ABSENT), cell
            if cell.outcome is not None and cell.outcome.trials:
                assert cell.outcome.p_value >= FALSE_ALARM


def test_hidden_cells_miss_their_interval_as_rarely_as_expected(quick: Suite) -> None:
    outside, promised = quick.outside
    assert promised >= 30
    assert outside <= 9  # about 0.7 expected: P < 1e-8


def test_decisive_attacks_succeed_where_nothing_is_promised(quick: Suite) -> None:
    open_cells = [c for c in quick.cells if c.attack.decisive and c.attack.party not in c.scheme.hides_from]
    fallen = {(c.attack.name, c.scheme.name) for c in open_cells if c.outcome and c.outcome.broken}
    assert len({attack for attack, _ in fallen}) == sum(a.decisive for a in ATTACKS)
    readable = [c for c in open_cells if c.attack.party == "executor"]
    assert {c.scheme.name for c in readable} == set(READABLE)
    assert {(c.attack.name, c.scheme.name) for c in readable} <= fallen


def test_data_that_no_scheme_hides_is_found_on_every_scheme(quick: Suite) -> None:
    for cell in quick.cells:
        if cell.attack.by_design:
            assert cell.verdict is Verdict.BY_DESIGN, (cell.attack.name, cell.scheme.name)


def test_counts_tell_topics_and_languages_unless_the_endpoint_keeps_a_pace(quick: Suite) -> None:
    trials = quick.trials("Topics")
    assert len(trials) == 15
    uneven = [trial.outcome for trial in trials if trial.labels[2] == "answers outside their bucket"]
    assert [outcome.hits for outcome in uneven] == [0] * 5
    found = {trial.labels: trial.outcome for trial in trials}
    for guessed in ("language", "topic"):
        without = found["none", "counts", guessed]
        assert without.interval.low > 1.5 * without.chance
        assert not found["--answer-bucket 32 --pace", "counts and times, lengths / 16", guessed].broken
    assert [t.outcome.hits for t in quick.trials("Planted faults") if t.labels[2] == TopicsOfChats.name] == [1]


def test_the_attack_on_topics_reads_counts_and_times_and_nothing_else() -> None:
    """Numbers of rows tell labels, times tell labels, and traces without either score at chance."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (160,), generator=rng)
    noise = torch.rand(160, generator=rng).tolist()

    def traces(rows: bool, times: bool) -> list[list[Step]]:
        made = []
        for label, luck in zip(labels.tolist(), noise, strict=True):
            begins = [luck + i * (1.0 + times * label) for i in range(3)]
            made.append([Step(5 + rows * label, begin, begin + 0.5) for begin in begins])
        return made

    attack = TopicsOfChats()
    assert attack.run(traces(rows=True, times=False), labels).success > 0.9
    assert attack.run(traces(rows=False, times=True), labels).success > 0.9
    assert attack.run(traces(rows=False, times=False), labels).at_chance


@pytest.mark.parametrize(
    ("rows", "wrong"), [([8, 1, 1, 1], 0), ([7, 1, 1, 1], 1), ([8, 1, 1], 1), ([8, 1, 1, 2], 1), ([4, 4, 1, 1, 1], 0)]
)
def test_an_answer_outside_its_bucket_is_uneven(rows: list[int], wrong: int) -> None:
    assert uneven([[Step(count, 0.0, 0.0) for count in rows]], bucket=4, rows=1) == wrong


def test_rows_of_composed_groups_are_read_without_a_mask_and_hidden_with_one(quick: Suite) -> None:
    found = {trial.labels: trial for trial in quick.trials("Two round trips")}
    for attack in ("two-row distinguisher, forward", "uniformity of bytes"):
        assert found["none", attack].outcome.broken
        assert not found["pad", attack].outcome.broken
    assert found["pad", "collusion, forward"].outcome.broken
    for scheme, masked in (("none", True), ("pad", False)):
        assert found[scheme, "two-row distinguisher, forward"].must_find is masked


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_executor_and_all_helpers_together_read_pads_and_find_nothing_to_pool_on_local(
    quick: Suite, direction: str
) -> None:
    for scheme in (PAD, PADS):
        assert outcome_of(quick, f"collusion, {direction}", scheme.name).success == 1.0
        assert quick.cell(f"collusion, {direction}", scheme.name).verdict is Verdict.BY_DESIGN
    assert quick.cell(f"collusion, {direction}", "local").verdict is Verdict.ABSENT


@pytest.mark.parametrize("scheme", [PADS_3], ids=lambda s: s.name)
def test_any_single_honest_helper_is_enough(lab: Lab, recorded: Recorded, scheme: AttackedScheme) -> None:
    """The executor and any k - 1 of k helpers distinguish nothing and read no row; with all k they succeed at both."""
    recording = recorded(scheme, replace(SMALL, game_rows=2048))
    executor, helpers = recording.views.executor, recording.views.helpers
    assert len(helpers) == scheme.helpers

    def outcome(attack: Coalition | Collusion, pooled: Sequence[HelperView]) -> Outcome:
        guess = attack.run(CollusionView(executor, tuple(pooled)), lab.public, torch.Generator().manual_seed(0))
        assert guess is not None
        return attack.score(guess, recording.truth)  # type: ignore[arg-type]

    for direction in DIRECTIONS:
        for honest in helpers:
            pooled = [helper for helper in helpers if helper is not honest]
            told = outcome(Coalition(direction), pooled)
            assert told.trials == 1024
            assert not told.broken
            read = outcome(Collusion(direction), pooled)
            assert read.hits == 0
            assert read.trials > 1000
        assert outcome(Coalition(direction), helpers).success == 1.0
        assert outcome(Collusion(direction), helpers).success == 1.0


@pytest.mark.parametrize("scheme", [PADS, PAD_24], ids=lambda s: s.name)
def test_a_recording_tells_rows_with_ml_kems_secrets_and_nothing_with_x25519s_alone(
    lab: Lab, recorded: Recorded, scheme: AttackedScheme
) -> None:
    recording = recorded(scheme, SMALL)
    harvested = recording.views.of("recorder")
    assert isinstance(harvested, RecorderView)
    assert len(harvested.links) >= scheme.helpers
    assert all(link.kem is None for link in harvested.links)
    assert all(len(request.seed) > SEED_BYTES for link in harvested.links for request, _ in link.effects)
    for link in harvested.links:  # the session may end before its last effects arrive
        assert any(payload for _, payload in link.effects)
    for direction in DIRECTIONS:
        without = examine(Harvest(direction), recording, lab).outcome
        assert without is not None
        assert without.hits == 0
        assert not without.broken
        known = score(Harvest(direction), replace(harvested, links=recording.views.links), lab.public, recording)
        assert known.success == 1.0
        assert known.trials == without.trials > 1000


@pytest.mark.parametrize(("size", "noise"), [(2, 256.0), (16, 1.0)])
def test_candidate_subtraction_reads_every_layer_at_any_pool_size(
    lab: Lab, recorded: Recorded, size: int, noise: float
) -> None:
    recording = recorded(paper_pool(size, noise), LARGER if noise == 1.0 else SMALL)
    for direction in ("forward", "backward"):
        outcome = examine(CandidateSubtraction(direction), recording, lab).outcome
        assert outcome is not None
        assert outcome.figures["worst layer"] >= 0.99
        rows = sum(len(e.rows) for e in recording.views.executor.exchanges) - size * int(outcome.figures["layers"])
        # one pool per layer and direction: the cost is a sum, but the paper counts a product
        assert outcome.figures["distances tried"] == rows * size
        assert outcome.figures["combinations, log10"] > 7


def test_a_tied_head_hides_logit_gradients_but_not_labels(tmp_path: Path) -> None:
    with Lab(tmp_path, tied=True, helpers=1) as tied:
        recording = tied.record(NONE, SMALL)
        assert examine(HeadLabels(), recording, tied).outcome is None
        outcome = examine(BlockLabels(), recording, tied).outcome
    assert outcome is not None
    assert outcome.success > 0.5
    assert outcome.broken


def test_an_attack_gets_a_view_but_not_the_truth(recorded: Recorded) -> None:
    views = recorded(PADS, replace(SMALL, game_rows=2048)).views
    for attack in ATTACKS:
        seen = vars(views.of(attack.party))
        assert not {"truth", "calls", "tokens", "labels_of_rows", "updates"} & seen.keys()


def test_the_quick_report_is_quick(quick: Suite) -> None:
    assert quick.as_expected
    assert quick.quick
    assert len(quick.cells) == len(ATTACKS) * len(QUICK_SCHEMES)


def test_the_page_loads_no_external_resource_and_has_every_table(quick: Suite, quick_page: Path) -> None:
    page = quick_page.read_text()
    html.parser.HTMLParser().feed(page)
    assert not re.findall(r"(?:href|src)=|url\(|@import|https?://", page)
    text = " ".join(html.unescape(re.sub("<[^>]*>", "", page)).split())
    for table in (summary(quick), *sections(quick), *charts(quick)):
        assert " ".join(str(table.title).split()) in text
    for name, said in origin(quick).items():
        assert f"{name}: {said}" in text
    for cell in quick.cells:
        assert cell.attack.name in text


def test_a_report_says_what_was_attacked_when_and_how(quick: Suite) -> None:
    told = origin(quick)
    assert told["version"] == __version__
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown: not run from a clone", told["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", told["date"])
    assert told["run"].startswith("quick")
    assert f"tenant's work {QUICK.seed}, " in told["seeds"]
    assert origin(replace(quick, quick=False))["run"] == "full"


def test_checks_without_chance_have_no_rate(quick: Suite) -> None:
    [lies] = [table for table in sections(quick) if "Active adversaries" in str(table.title)]
    rates = [str(cell) for cell in lies.columns[3].cells]
    for trial, rate in zip(quick.trials("Active adversaries"), rates, strict=True):
        assert (rate == "no chance is involved") == (trial.outcome.trials == 1)


def test_a_chart_compares_two_values_at_least(quick: Suite) -> None:
    scored = Counter(c.attack for c in quick.cells if c.outcome)
    assert [chart.row_count for chart in charts(quick)] == [n for n in map(scored.get, quick.attacks) if n and n > 1]
    one = tuple(c for c in quick.cells if c.scheme is quick.schemes[0])
    assert not list(charts(replace(quick, cells=one)))


BEGIN, END = "<!-- security-table:begin -->", "<!-- security-table:end -->"

PARTIES: tuple[tuple[Party, str], ...] = (
    ("executor", "executor"),
    ("helper", "helper"),
    ("executor+helper", "executor and helpers together"),
    ("network", "network, other tenants"),
)


def security_table() -> str:
    """Markdown with one row per scheme: what each party learns about rows, and under which assumption."""
    families: dict[str, AttackedScheme] = {}
    for scheme in SCHEMES:
        families.setdefault(scheme.family, scheme)
    lines = [
        "| masking | " + " | ".join(label for _, label in PARTIES) + " | rests on | results |",
        "|" + "---|" * (len(PARTIES) + 3),
    ]
    # the scheme that promises most is first
    for name, scheme in sorted(families.items(), key=lambda item: (-len(item[1].hides_from), item[0])):
        cells = ["hidden" if party in scheme.hides_from else "**reads rows**" for party, _ in PARTIES]
        if not scheme.helpers:
            cells = ["no helper" if "helper" in party[0] else c for party, c in zip(PARTIES, cells, strict=True)]
        masking = scheme.masking
        results = f"{masking.error or 'bit-exact'}, {'verified' if masking.verified else 'not verified'}"
        lines.append(f"| `{name}` | " + " | ".join(cells) + f" | {masking.assumption} | {results} |")
    lines += [
        "",
        "Row counts, stage and timing are visible under every scheme. `symbiosis-priv threat-model` attacks each cell "
        "and fails if one of them is wrong.",
    ]
    return "\n".join(lines)


def test_the_readme_shows_the_table_that_is_tested() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert BEGIN in readme, f"put the output of security_table() between {BEGIN} and {END}"
    assert readme.split(BEGIN)[1].split(END)[0].strip() == security_table().strip()


def test_no_attack_depends_on_a_schemes_name() -> None:
    names = {s.family for s in SCHEMES} | {s.name for s in SCHEMES}
    folder = Path(__file__).parents[2] / "threat_model" / "attacks"
    for module in folder.glob("*.py"):
        text = module.read_text(encoding="utf-8")
        assert "threat_model.evidence.schemes" not in text, module
        assert not [n for n in names if f'"{n}"' in text], module


ROOT = Path(__file__).parents[2]


def test_the_threat_model_names_every_attack_and_no_other() -> None:
    page = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
    # names in italics that are not prose are attacks or properties
    known = {TopicsOfChats.name} | {p.name for p in PROPERTIES}
    known |= {a.name for a in ATTACKS} | {a.name.rpartition(",")[0] for a in ATTACKS}
    prose = {"Leaks.", "Measured.", "Measured:", "Not covered.", "Proved.", "Proved:"}
    prose |= {"name", "which", "Also refuted by", "whatever the true value is"}
    italics = {" ".join(text.split()) for text in re.findall(r"(?<![*\w])\*(?!\s)([^*|`]+)(?<!\s)\*(?![*\w])", page)}
    assert italics <= known | prose, italics - known - prose
    for attack in ATTACKS:
        assert {attack.name, attack.name.rpartition(",")[0]} & italics, f"{attack.name} is missing from the page"


def test_masks_of_lwe_give_nothing_away_and_each_planted_fault_does(quick: Suite) -> None:
    trials = quick.trials("Masks of lwe")
    sound, planted = ([t.outcome for t in trials if (t.labels[1] == "none") == one] for one in (True, False))
    assert len(sound) == len(planted) == 4
    assert not any(outcome.broken for outcome in sound)
    assert all(outcome.success > 0.99 for outcome in planted)
