"""Clients get equal turns, whatever they ask for."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given, strategies as st

from tenant.endpoint.engine.queued import Turns
from tenant.endpoint.engine.requests import EngineRequest


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
