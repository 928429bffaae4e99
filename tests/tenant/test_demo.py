"""`symbiosis-priv demo` on a user's own checkpoint and text, through the command line, and claims that can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from symbiosis_priv.cli import app
from tenant.demo.base_model import Pretraining, make_base_model
from tenant.demo.claims import Figures, claims
from tenant.demo.text import private_text
from tenant.quality import Quality
from tenant.session import Ledger


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("demo-run")
    recipe = Pretraining(steps=60, batch=8, window=64, sentences=3000, vocab=320)
    model = make_base_model(folder / "base", recipe=recipe)
    (folder / "text.txt").write_text("\n".join(private_text(seed=3, records=60)), encoding="utf-8")
    arguments = ["demo", "--model", str(model), "--text", str(folder / "text.txt"), "--steps", "2"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(folder / "figures.json")])
    assert result.exit_code == 0, result.output
    assert "all 9 claims hold" in result.output
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return figures


def test_every_claim_holds_on_a_users_own_model(report: dict[str, Any]) -> None:
    assert report["passed"]
    assert all(claim["holds"] for claim in report["claims"])
    assert len(report["figures"]["losses"]) == 2


def _figures(report: dict[str, Any], **changes: Any) -> Figures:
    plain = dict(report["figures"])
    for name in ("losses", "simulated_losses", "tokens_before", "tokens_after", "tokens_simulated"):
        plain[name] = tuple(plain[name])
    plain["quality"] = Quality(**plain["quality"])
    plain["ledger"], plain["generation"] = Ledger(**plain["ledger"]), Ledger(**plain["generation"])
    return replace(Figures(**plain), **changes)


@pytest.mark.parametrize(
    "change",
    [
        {"simulated_losses": (1.0, 2.0)},
        {"adapter_tensors_equal": 1},
        {"tokens_simulated": (1, 2, 3)},
        {"tampered_rejected": 47},
        {"offloaded_bytes": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_wrong_figure_fails_exactly_its_claim(report: dict[str, Any], change: dict[str, Any]) -> None:
    assert all(claim.holds for claim in claims(_figures(report)))
    assert sum(not claim.holds for claim in claims(_figures(report, **change))) == 1


def test_poor_quality_and_an_unverified_answer_fail(report: dict[str, Any]) -> None:
    good = _figures(report)
    poor = replace(good.quality, top1=0.98, perplexity=1.02 * good.quality.reference_perplexity)
    assert sum(not claim.holds for claim in claims(replace(good, quality=poor))) == 2
    unverified = replace(good.ledger, answers_verified=good.ledger.rows - 1)
    assert sum(not claim.holds for claim in claims(replace(good, ledger=unverified))) == 1
