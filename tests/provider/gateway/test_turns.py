"""Whose handshake goes on: networks by turns, and over time no more than the share of one core."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provider.gateway.strangers import Stranger
from provider.gateway.turns import Turns


@pytest.fixture(scope="module")
def pipe() -> Iterator[socket.socket]:
    """Nobody reads from it: turns are about names."""
    with socket.socket() as unconnected:
        yield unconnected


@given(st.lists(st.tuples(st.floats(0, 0.1), st.floats(1e-5, 0.01)), max_size=300), st.floats(0.01, 1.0))
def test_over_time_no_more_than_the_share_is_taken(steps: list[tuple[float, float]], share: float) -> None:
    turns, now, taken = Turns(share, 0.0), 0.0, 0.0
    for pause, seconds in steps:
        now += pause
        now += turns.delay(now)
        turns.delay(now)
        turns.charge(seconds)
        taken += seconds
        assert taken <= share * (now + 1.0) + max(step for _, step in steps) + 1e-6


def test_who_was_alone_for_a_second_takes_everybody_in_at_once() -> None:
    turns = Turns(0.25, 0.0)
    for _ in range(250):
        assert turns.delay(0.0) == 0
        turns.charge(0.001)
    turns.charge(0.001)
    assert turns.delay(0.0) == pytest.approx(0.004)
    assert turns.delay(0.002) == pytest.approx(0.002)
    assert turns.delay(1000.0) == 0
    turns.charge(0.26)
    assert turns.delay(1000.0) > 0  # no more than a second's worth was saved up


def test_a_new_share_counts_from_now_on() -> None:
    turns = Turns(1.0, 0.0)
    turns.charge(1.1)
    assert turns.delay(0.0) == pytest.approx(0.1)
    turns.share = 0.1
    assert turns.delay(0.0) == pytest.approx(1.0)


@given(st.lists(st.sampled_from("abbbbbbbc"), max_size=60))
def test_a_crowd_waits_behind_itself(letters: list[str]) -> None:
    """Nobody waits for more than one step of each other network, and for those of its own who came before."""
    with socket.socket() as pipe:
        turns = Turns(1.0, 0.0)
        strangers = [Stranger(pipe, f"10.0.0.{ord(letter)}", deadline=0.0) for letter in letters]
        for stranger in strangers:
            turns.wait(stranger)
        taken = [turns.take() for _ in strangers]
        assert not turns
        for network in {s.network for s in strangers}:
            assert [s for s in taken if s.network == network] == [s for s in strangers if s.network == network]
        for place, stranger in enumerate(taken):
            before = [s for s in taken[:place] if s.network == stranger.network]
            for other in {s.network for s in taken[:place]} - {stranger.network}:
                assert sum(s.network == other for s in taken[:place]) <= len(before) + 1


def test_who_has_left_is_not_asked_for(pipe: socket.socket) -> None:
    turns = Turns(1.0, 0.0)
    first, second = (Stranger(pipe, "10.0.0.1", deadline=0.0) for _ in range(2))
    turns.wait(first)
    turns.wait(second)
    assert turns.longest == ("10.0.0.1", 2)
    assert turns.leave(first)
    assert not turns.leave(first)
    assert turns.take() is second
    assert not turns
