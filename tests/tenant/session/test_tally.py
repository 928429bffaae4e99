"""A session's ledger: its figures of each provider."""

import time

import pytest
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.connections.executor_client import PARALLEL_CHANNELS
from tenant.session.traffic import PredictedTraffic, of_step, of_token
from tests.tenant.conftest import NewProvider, NewSession
from tests.tenant.scripted import Heard, ScriptedProvider, frame


def rows(count: int = 4) -> Tensor:
    return torch.arange(count * 64, dtype=torch.int32).reshape(count, 64) % 7


def test_the_ledger_shows_a_liar_and_the_others_work(
    new_session: NewSession, new_provider: NewProvider, executor: ScriptedProvider, helper: ScriptedProvider
) -> None:
    def lie(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        return frame(reply, answer + 1)

    liar = new_provider()
    liar.behaviour = lie
    session = new_session("pad", [liar, executor], [helper], pool_memory=0)
    session.product(GroupIndex(0), FORWARD, rows())
    session.product(GroupIndex(0), FORWARD, rows())
    found = {(figures.name, figures.role): figures for figures in session.ledger().providers}
    first, second, sharing = (
        found[peer.name, peer.role]
        for peer in (liar.peer("executor"), executor.peer("executor"), helper.peer("helper"))
    )
    assert (first.state, first.rejected, first.verified) == ("quarantined", 1, 0)
    assert (second.state, second.rejected) == ("up", 0)
    assert second.verified == 2
    assert second.requests >= 2
    assert second.latency_s is not None
    assert sharing.verified >= 2
    since = time.monotonic() - 5
    session.runtime.notices.waiting(helper.peer("helper").label, since=since, until=since + 9, why="it was killed")
    *others, waiting = session.ledger().providers
    assert [figures.state for figures in (*others, waiting)] == ["quarantined", "up", "not answering"]
    assert waiting.waited_s is not None
    assert waiting.left_s is not None
    assert waiting.waited_s >= 5
    assert waiting.waited_s + waiting.left_s == pytest.approx(9)
    assert {figures.left_s for figures in others} == {None}
    session.runtime.notices.answered(helper.peer("helper").label)
    ledger = session.ledger()
    assert [figures.state for figures in ledger.providers] == ["quarantined", "up", "up"]
    executors = [figures for figures in ledger.providers if figures.role == "executor"]
    assert sum(figures.bytes_sent for figures in executors) == ledger.bytes_to_executors
    assert sum(figures.bytes_received for figures in ledger.providers) == (
        ledger.bytes_from_executors + ledger.bytes_from_helpers
    )


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
