"""No client holds more than stays free."""

from hypothesis import example, given, strategies as st

from symbiosis_priv.system.fair_share import FairShare

TAKES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.booleans()))


@example(10, [("a", 6, False)])  # at random, the mutation was not always noticed
@given(st.integers(1, 100), TAKES)
def test_no_client_holds_more_than_stays_free(total: int, takes: list[tuple[str, int, bool]]) -> None:
    share, held = FairShare[str](total), dict.fromkeys("abc", 0)
    for client, amount, back in takes:
        if back and held[client]:
            share.give_back(client, held[client])
            held[client] = 0
            continue
        may = share.may_take(client, amount)
        taken = share.take(client, amount)
        assert taken == may == (held[client] + amount <= total - sum(held.values()) - amount + 1)
        if taken:
            held[client] += amount
            assert held[client] <= share.free + 1
        assert {name: share.held(name) for name in held} == held
        assert share.used == sum(held.values()) == total - share.free


@given(st.integers(1, 60), st.integers(1, 5))
def test_clients_that_take_what_they_can_get_equal_shares_and_one_more_finds_room(total: int, clients: int) -> None:
    share = FairShare[int](total)
    while sum(share.take(client) for client in range(clients)):
        pass
    held = [share.held(client) for client in range(clients)]
    assert max(held) - min(held) <= 1
    assert sum(held) < total or total <= clients
    assert share.free == 0 or share.take(clients)
