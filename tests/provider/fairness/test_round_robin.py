"""Clients take turns."""

from hypothesis import given
from hypothesis import strategies as st

from provider.fairness.round_robin import RoundRobin


@given(st.lists(st.sampled_from("abbbbbbbc"), max_size=60))
def test_a_client_with_many_items_does_not_delay_others(clients: list[str]) -> None:
    """An item waits for the earlier items of its own client, and for at most as many, plus one, of each other
    client."""
    queue: RoundRobin[str, tuple[str, int]] = RoundRobin()
    items = [(client, number) for number, client in enumerate(clients)]
    for item in items:
        queue.put(item[0], item)
    assert len(queue) == len(items)
    taken = [queue.get() for _ in items]
    assert not queue
    for client in set(clients):
        assert [item for item in taken if item[0] == client] == [item for item in items if item[0] == client]
    for place, (client, _) in enumerate(taken):
        before = [other for other, _ in taken[:place]]
        assert all(before.count(other) <= before.count(client) + 1 for other in set(before))


def test_removed_items_are_not_returned() -> None:
    queue: RoundRobin[str, int] = RoundRobin()
    queue.put("a", 1)
    queue.put("a", 2)
    assert queue.longest == ("a", 2)
    assert queue.of("a") == [1, 2]
    assert queue.of("b") == []
    assert queue.remove("a", 1)
    assert not queue.remove("a", 1)
    assert not queue.remove("b", 1)
    assert queue.get() == 2
    assert not queue
