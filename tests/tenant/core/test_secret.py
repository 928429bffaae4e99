"""The session secret: fresh for every session, one seed for each holder, rows burnt once, nothing survives a fork."""

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.errors import BurntRowError
from symbiosis_priv.limits import MAX_ROWS
from tenant.core.pads import SessionSecret
from tests.warm import run


def test_helpers_know_no_seed_but_their_own() -> None:
    secret = SessionSecret()
    holders = [("a",), ("b",), ("ab",), ("a", "b"), ("a", "bc"), ("ab", "c")]
    seeds = [secret.seed_for(*holder) for holder in holders]
    assert len(set(seeds)) == len(holders)
    assert all(len(seed) == 32 for seed in seeds)
    assert secret.seed_for("a") == seeds[0]


class SlowCount(int):
    """A number of rows whose addition is slow, so that another thread runs between reading and writing."""

    def __radd__(self, other: int) -> int:
        time.sleep(1e-5)
        return int(other) + int(self)


def test_burnt_ranges_never_overlap_under_threads() -> None:
    secret = SessionSecret()
    sizes = [SlowCount(1 + i % 5) for i in range(1000)]
    with ThreadPoolExecutor(8) as pool:
        firsts = list(pool.map(lambda rows: secret.burn(group_name="g", direction="forward", rows=rows), sizes))
    ranges = sorted(zip(firsts, sizes, strict=True))
    assert all(a + int(rows) == b for (a, rows), (b, _) in pairwise(ranges))
    assert secret.burn(group_name="g", direction="forward", rows=0) == sum(map(int, sizes))


@given(sizes=st.lists(st.integers(0, MAX_ROWS) | st.integers(0, 1 << 12), min_size=1, max_size=30))
def test_no_index_is_burnt_twice_by_draws_of_any_size(sizes: list[int]) -> None:
    """Other groups and directions count on their own."""
    secret = SessionSecret()
    places = [("g", "forward"), ("g", "backward"), ("h", "forward")]
    drawn: dict[tuple[str, str], list[range]] = {place: [] for place in places}
    for number, rows in enumerate(sizes):
        name, direction = place = places[number % 3 if number % 2 else 0]
        first = secret.burn(group_name=name, direction=direction, rows=rows)
        drawn[place].append(range(first, first + rows))
    for spans in drawn.values():
        assert all(one.stop <= other.start for one, other in pairwise(spans))


@given(token=st.binary(min_size=32, max_size=32), bit=st.integers(0, 255))
def test_every_bit_of_a_random_token_of_256_bits_decides_the_seeds(token: bytes, bit: int) -> None:
    other = (int.from_bytes(token) ^ 1 << bit).to_bytes(32)

    def seed_from(given: bytes) -> bytes:
        with mock.patch("secrets.token_bytes", lambda size=32: given[:size]):
            return SessionSecret().seed_for("helper", "key")

    assert seed_from(token) == seed_from(token) != seed_from(other)


def test_a_counter_never_decreases() -> None:
    secret = SessionSecret()
    secret.burn(group_name="g", direction="forward", rows=7)
    with pytest.raises(BurntRowError):
        secret.burn(group_name="g", direction="forward", rows=-7)
    assert secret.burn(group_name="g", direction="forward", rows=1) == 7


def test_a_secret_is_not_printed() -> None:
    secret = SessionSecret()
    assert re.fullmatch(r"SessionSecret\(\.\.\.\)", repr(secret))
    assert str(secret) == f"{secret}" == repr(secret)


FORKED = """
import ctypes
import multiprocessing
import os
import subprocess
import sys
from symbiosis_priv.errors import BurntRowError
from tenant.core.pads import SessionSecret

secret = SessionSecret()
secret.burn(group_name="g", direction="forward", rows=3)
if "same process id" in sys.argv:  # as in a new pid namespace, or when an id is used again
    pid = os.getpid()
    os.getpid = lambda: pid


def use(_=None):
    try:
        secret.burn(group_name="g", direction="forward", rows=1)
    except BurntRowError:
        os._exit(7)


by_c_code = ctypes.PyDLL(None).fork  # runs no hook of Python's


def fork(work, fork=os.fork):
    if not (child := fork()):
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


assert fork(use) == 7
assert fork(lambda: os._exit(fork(use))) == 7, "a grandchild could use it"
if "same process id" not in sys.argv:
    assert fork(use, by_c_code) == 7, "a child of libc's fork could use it"
    assert fork(lambda: os._exit(fork(use, by_c_code)), by_c_code) == 7, "a grandchild of libc's fork could use it"
worker = multiprocessing.get_context("fork").Process(target=use)
worker.start()
worker.join()
assert worker.exitcode == 7
subprocess.run([sys.executable, "-c", ""], check=True)  # vfork and exec: nothing of ours runs in between

child = os.fork()
if child == 0:
    refused = 0
    for use in (lambda: secret.seed_for("h"), lambda: secret.burn(group_name="g", direction="forward", rows=1)):
        try:
            use()
        except BurntRowError:
            refused += 1
    fresh = SessionSecret()
    os._exit(0 if refused == 2 and not secret.alive and fresh.alive and fresh.seed_for("h") else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, "the child could use its parent's secret"
assert secret.alive and secret.burn(group_name="g", direction="forward", rows=1) == 3
"""


@pytest.mark.parametrize("ids", ["own process id", "same process id"])
def test_a_forked_child_cannot_use_the_secret(ids: str) -> None:
    """The fork takes place in another process, because a fork of this one, with torch's threads, is undefined."""
    run([sys.executable, "-c", FORKED, ids], check=True, timeout=60)
