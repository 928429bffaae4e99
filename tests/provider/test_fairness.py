"""Clients take turns, and rates are limited."""

import pytest
from hypothesis import given, strategies as st

from provider.fairness import RoundRobin, TokenBucket


@given(st.lists(st.sampled_from("abbbbbbbc"), max_size=60))
def test_a_client_with_many_items_does_not_delay_others(clients: list[str]) -> None:
    """An item waits for the earlier items of its own client, and for at most as many, plus one, of each other
    client."""
    queue: RoundRobin[tuple[str, int]] = RoundRobin()
    items = [(client, number) for number, client in enumerate(clients)]
    for item in items:
        queue.put(item[0], item)
    taken = [queue.get() for _ in items]
    assert not queue
    for client in set(clients):
        assert [item for item in taken if item[0] == client] == [item for item in items if item[0] == client]
    for place, (client, _) in enumerate(taken):
        before = [other for other, _ in taken[:place]]
        assert all(before.count(other) <= before.count(client) + 1 for other in set(before))


def test_a_new_rate_counts_from_now_on() -> None:
    bucket = TokenBucket(per_s=1.0, burst=1.0, now=0.0)
    bucket.take(1.1)
    assert bucket.delay(0.0) == pytest.approx(0.1)
    bucket.change(per_s=0.1, burst=0.1)
    assert bucket.delay(0.0) == pytest.approx(1.0)
