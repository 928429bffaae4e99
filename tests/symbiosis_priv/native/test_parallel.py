"""Slices cover everything once, for all sizes and thread counts, also in a forked child."""

import multiprocessing
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.native import for_each_slice


@given(total=st.integers(0, 200), least=st.integers(1, 50))
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_unit_is_done_once(threads: int, total: int, least: int) -> None:
    done: list[int] = []  # appending is atomic
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.get_num_threads", lambda: threads)
        for_each_slice(lambda begin, end: done.extend(range(begin, end)), total=total, least=least)
    assert sorted(done) == list(range(total))


def test_errors_reach_the_caller(set_threads: Callable[[int], None]) -> None:
    set_threads(2)

    def fail(begin: int, end: int) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        for_each_slice(fail, total=64, least=1)


def _in_a_fork() -> None:
    done: list[int] = []
    for_each_slice(lambda begin, end: done.extend(range(begin, end)), total=64, least=1)
    assert sorted(done) == list(range(64))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_its_own_threads(set_threads: Callable[[int], None]) -> None:
    set_threads(2)
    _in_a_fork()  # the parent's threads exist
    child = multiprocessing.get_context("fork").Process(target=_in_a_fork)
    child.start()
    child.join(60)
    assert child.exitcode == 0
