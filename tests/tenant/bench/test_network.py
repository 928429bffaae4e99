"""What the design predicts for a line, and that a session over one costs exactly so much."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.errors import ConfigError
from tenant.bench import cli as bench_cli
from tenant.bench.network import explain
from tenant.bench.prediction import Traffic, of_step, of_token
from tenant.bench.report import read
from tenant.bench.scale import number
from tenant.connections.executor import LANES


def llama_7b() -> list[GroupEntry]:
    shapes = [(4096, 3 * (4096,)), (4096, (4096,)), (4096, 2 * (11008,)), (11008, (4096,))]
    return [
        GroupEntry(members=tuple(f"layers.{i}.{k}" for k in outputs), inputs=inputs, outputs=outputs, digest="")
        for i in range(32)
        for inputs, outputs in shapes
    ]


def test_a_token_of_llama_2_7b_costs_what_is_written() -> None:
    """Figures that were worked out by hand; frames have heads besides."""
    token = of_token(llama_7b())
    assert token.round_trips == token.turns == 4 * 32
    assert token.up == pytest.approx(2.98e6, rel=0.01)
    assert token.down == pytest.approx(5.44e6, rel=0.01)
    assert token.effects == 5439488


def test_a_step_goes_forward_and_back_in_pieces() -> None:
    """The first group has nobody to hand a gradient to; large products share their latency among connections."""
    groups, rows = llama_7b()[:4], 512
    step = of_step(groups, rows=rows)
    columns = [4 * rows * (group.inputs + group.stacked_outputs) for group in groups]
    assert step.up + step.down - sum(2 * columns) + columns[0] < 300 * step.round_trips  # headers
    assert step.round_trips == 7 * 4
    assert step.turns == 7 * 4 // LANES
    assert of_step(groups, rows=1).round_trips == of_step(groups, rows=1).turns == 7
    assert sum([step, step], Traffic()).up == 2 * step.up


def test_a_session_costs_what_the_design_predicts(tmp_path: Path) -> None:
    """To the byte, over a slow line."""
    shape = ["--width", "64", "--layers", "1", "--inner", "64", "--tokens", "16", "--threads", "1", "--repeat", "2"]
    line = ["--condition", "20mbit/20ms", "--line", "proxy", "--json", str(tmp_path / "n.json")]
    result = CliRunner().invoke(bench_cli.app, ["network", *shape, *line], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "line: proxy" in result.output
    rows = read(tmp_path / "n.json").rows
    assert [(row["condition"], row["work"]) for row in rows] == [
        (condition, work) for condition in ("no limit, 0 ms", "20 Mbit/s, 20 ms") for work in ("step", "token")
    ]
    for row in rows:
        for name in ("round_trips", "bytes_up", "bytes_down"):
            assert row[name] == row[f"{name}_by_design"]
        trips = 7 if row["work"] == "step" else 4
        assert row["round_trips"] == trips
    for row in rows[2:]:
        assert number(row["measured_s"]) >= number(row["latency_s"]) == pytest.approx(0.02 * number(row["round_trips"]))
        assert str(row["difference"]) in result.output


def test_differences_are_explained_by_what_was_measured() -> None:
    assert explain(-0.3, 1.2, turns=31, carrier_s=0) == "0.30 s of effects come while rows go"
    assert explain(-0.3, 0.2, turns=31, carrier_s=0) == "0.20 s of effects come while rows go; 0.10 s is noise"
    assert explain(-0.02, 0, turns=16, carrier_s=0) == "20 ms is noise"
    assert explain(0.16, 0, turns=16, carrier_s=0) == "10 ms more per turn"
    assert explain(0.16, 0, turns=16, carrier_s=0.016) == "10 ms more per turn; the line itself takes 1 ms of CPU"


@pytest.mark.parametrize("arguments", [["--line", "carrier-pigeon"], ["--condition", "slow"]])
def test_wrong_options_are_explained(arguments: list[str]) -> None:
    result = CliRunner().invoke(bench_cli.app, ["network", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert arguments[1] in str(result.exception)
