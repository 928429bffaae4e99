"""The traffic that the design predicts; `test_bench_commands.py` compares it with a session, to the byte."""

import pytest

from symbiosis_priv.checkpoints.manifest import GroupEntry
from tenant.bench.network import explain
from tenant.connections.executor_client import PARALLEL_CHANNELS
from tenant.session.traffic import PredictedTraffic, of_step, of_token


def llama_7b() -> list[GroupEntry]:
    shapes = [(4096, 3 * (4096,)), (4096, (4096,)), (4096, 2 * (11008,)), (11008, (4096,))]
    return [
        GroupEntry(members=tuple(f"layers.{i}.{k}" for k in outputs), inputs=inputs, outputs=outputs, digest="")
        for i in range(32)
        for inputs, outputs in shapes
    ]


def test_the_traffic_of_a_llama_2_7b_token_equals_the_documented_figures() -> None:
    """Figures that were computed by hand, plus the headers of frames."""
    token = of_token(llama_7b())
    assert token.round_trips == token.turns == 4 * 32
    assert token.up == pytest.approx(2.98e6, rel=0.01)
    assert token.down == pytest.approx(5.44e6, rel=0.01)
    assert token.effects == 5439488


def test_a_step_goes_forward_and_back_in_parts() -> None:
    """The first group has no backward product; the parts of a large product share their latency."""
    groups, rows = llama_7b()[:4], 512
    step = of_step(groups, rows)
    columns = [4 * rows * (group.inputs + group.stacked_outputs) for group in groups]
    assert step.up + step.down - sum(2 * columns) + columns[0] < 300 * step.round_trips  # headers
    assert step.round_trips == 7 * 4
    assert step.turns == 7 * 4 // PARALLEL_CHANNELS
    assert of_step(groups, 1).round_trips == of_step(groups, 1).turns == 7
    assert sum([step, step], PredictedTraffic()).up == 2 * step.up


def test_differences_are_explained_by_measurements() -> None:
    assert explain(-0.3, 1.2, turns=31, emulation_s=0) == "0.30 s of effects arrive while rows are sent"
    assert (
        explain(-0.3, 0.2, turns=31, emulation_s=0) == "0.20 s of effects arrive while rows are sent; 0.10 s is noise"
    )
    assert explain(-0.02, 0, turns=16, emulation_s=0) == "20 ms is noise"
    assert explain(0.16, 0, turns=16, emulation_s=0) == "10 ms more per turn"
    assert explain(0.16, 0, turns=16, emulation_s=0.016) == "10 ms more per turn; the emulation takes 1 ms of CPU"
