"""Clients get equal turns, whatever they ask for."""

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.errors import DeadlineExceededError
from tenant.endpoint.engine import queued
from tenant.endpoint.engine.queued import Engine, Turn, Turns
from tenant.endpoint.engine.requests import EngineRequest, Event, Failed
from tenant.session.tally import Ledger


def asked(client: str, adapter: str | None) -> Any:
    return SimpleNamespace(request=EngineRequest(id="r", prompt=(1,), client=client, adapter=adapter))


def served(turns: Turns) -> list[str]:
    """The clients in the order of their turns."""
    order = []
    while (first := turns.first()) is not None:
        turns.remove(first)
        order.append(first.request.client)
    return order


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, "x", "y", "z"])), max_size=30))
def test_each_client_that_waits_has_one_turn_in_a_round(kinds: list[tuple[str, str | None]]) -> None:
    """A client with many adapters has no more turns than a client with one."""
    turns = Turns(asked(*kind) for kind in kinds)
    assert len(turns) == len(list(turns)) == sum(turns.count(client) for client in "abc") == len(kinds)
    clients = list(dict.fromkeys(client for client, _ in kinds))
    counts = {client: turns.count(client) for client in clients}
    rounds = [[client for client in clients if counts[client] > number] for number in range(len(kinds))]
    assert served(turns) == [client for clients in rounds for client in clients]
    assert len(turns) == 0


def test_adapters_of_a_client_take_turns() -> None:
    turns = Turns([asked("a", "x"), asked("a", "x"), asked("a", "y"), asked("b", "x")])
    order = []
    while (first := turns.first()) is not None:
        turns.remove(first)
        order.append((first.request.client, first.request.adapter))
    assert order == [("a", "x"), ("b", "x"), ("a", "y"), ("a", "x")]


class Waits(Engine):
    """An engine whose turn never comes."""

    def step(self) -> None:
        raise AssertionError

    def _counters(self) -> Ledger:
        return Ledger()


def test_a_turn_that_does_not_come_ends_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued, "_TURN_S", 0.05)
    turn, events, tokenizer = Turn(), SimpleQueue[Event](), SimpleNamespace(decode=lambda *_, **__: "")
    with turn:
        engine = Waits(None, tokenizer, tasks=None, max_waiting=2, context=99, turn=turn)  # type: ignore[arg-type]
        engine.submit(EngineRequest(id="r", prompt=(1,)), events.put)
        failed = events.get(timeout=30)
        engine.close()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, DeadlineExceededError)
