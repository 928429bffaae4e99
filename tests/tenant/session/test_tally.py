"""A session's ledger: its figures of each provider."""

import time

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
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
    states = [figures.state for figures in session.ledger().providers]
    assert states == ["quarantined", "up", "not answering"]
    session.runtime.notices.answered(helper.peer("helper").label)
    ledger = session.ledger()
    assert [figures.state for figures in ledger.providers] == ["quarantined", "up", "up"]
    executors = [figures for figures in ledger.providers if figures.role == "executor"]
    assert sum(figures.bytes_sent for figures in executors) == ledger.bytes_to_executors
    assert sum(figures.bytes_received for figures in ledger.providers) == (
        ledger.bytes_from_executors + ledger.bytes_from_helpers
    )
