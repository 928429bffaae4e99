"""The session secret: fresh for every session, one seed for each holder, rows burnt once, nothing survives a fork; and
the keys that are derived from secrets."""

import ast
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st

import tenant
from symbiosis_priv.arithmetic.keystream import Seed, mask_key
from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.errors import BurntRowError
from symbiosis_priv.limits import MAX_ROWS, GroupIndex
from symbiosis_priv.network import wire
from symbiosis_priv.network.hybrid import Sealing, connection_key
from tenant.core.blame import BlameKeys
from tenant.core.pads import SessionSecret
from tenant.core.verifier import VerificationKeys
from tenant.preparation.keys import mac
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


def use():
    refused = 0
    for ask in (lambda: secret.seed_for("h"), lambda: secret.burn(group_name="g", direction="forward", rows=1)):
        try:
            ask()
        except BurntRowError:
            refused += 1
    fresh = SessionSecret()
    os._exit(7 if refused == 2 and not secret.alive and fresh.alive and fresh.seed_for("h") else 1)


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
assert secret.alive and secret.burn(group_name="g", direction="forward", rows=1) == 3
"""


@pytest.mark.parametrize("ids", ["own process id", "same process id"])
def test_a_forked_child_cannot_use_the_secret(ids: str) -> None:
    """The fork takes place in another process, because a fork of this one, with torch's threads, is undefined."""
    run([sys.executable, "-c", FORKED, ids], check=True, timeout=60)


# Known answers of every key that is derived from a secret: no two keys are one, and no change alters them unnoticed.
# Keystreams are made by tenants and helpers of different releases, so these answers are part of the protocol.

SECRET = bytes(range(32))
FOURTH = GroupIndex(4)
ROOT = Path(tenant.__file__).parents[1]


def helper_seed() -> bytes:
    with mock.patch("secrets.token_bytes", lambda size: SECRET[:size]):
        return SessionSecret().seed_for("one", "its key")


def connection() -> bytes:
    share, answer = wire.KeyShare(share=bytes(1216)), wire.KeyAnswer(share=bytes(1120))
    return connection_key(SECRET, share, answer, bytes(12))


def sealed_seed() -> bytes:
    place: dict[str, Any] = {"nonce": bytes(16), "group": 3, "direction": "forward", "arithmetic": "ring", "rows": 5}
    return Sealing(SECRET).seal(wire.Effect(**place, seed=Seed(SECRET), first_row=7)).seed


def check_column() -> list[int]:
    """R, which the identity matrix does not change."""
    keys = VerificationKeys(SECRET)
    keys.add(FOURTH, torch.eye(2, dtype=torch.int16))
    column: list[int] = keys.products[FOURTH, FORWARD].tolist()
    return column


def column_of_experts() -> list[int]:
    """R of a dense product of two experts, whose matrices are numbers."""
    keys = VerificationKeys(SECRET)
    keys.add_stack(FOURTH, torch.ones(2, 1, dtype=torch.int16), experts=2, transposed=False)
    column: list[int] = keys[FOURTH, FORWARD][0].values.tolist()
    return column


def blame_column() -> list[int]:
    keys = BlameKeys(SECRET, columns=1)
    keys.add(FOURTH, torch.eye(2, dtype=torch.int16), weight_bits=10)
    column: list[int] = keys.products[FOURTH, FORWARD].flatten().tolist()
    return column


PLACE = {"group_name": "layer.0", "direction": "forward"}
KNOWN: dict[str, tuple[Callable[[], bytes | list[int]], str | list[int]]] = {
    "helper": (helper_seed, "e10440d981c50545e003b373124c297b025c4bc6a7cb00bc36264de46fb8d3e2"),
    "mask": (
        lambda: mask_key(Seed(SECRET), **PLACE),
        "0284992f81adc3fb73f4056edc25acd286ce56d3422b3dd03fa921be0ea0e9fc",
    ),
    "connection": (connection, "136abf4e3254d1f34a1afd529262a4958501ffd04b686c48de76c345a6adfd13"),
    "seeds": (
        sealed_seed,
        "a12975329d49815edcef929d1f03989290a355f18f1d7b42539b6deb0cbabec702f530bcdff2c691009874d816225b5a",
    ),
    "effects": (
        lambda: bytes(Sealing(SECRET).cover(bytes(16), memoryview(bytes(16)))),
        "91a0e9e8a0e1d2e3219293edd11bb0a5",
    ),
    "check": (check_column, [1220035414777612680, 1281815671437598392]),
    "check experts": (column_of_experts, [403268441053321065, 1037766461579365793]),
    "verify": (blame_column, [1152205593, 153042273]),
    "mac": (
        lambda: mac(VerificationKeys(SECRET), "seal", "a"),
        "37544a95920ff72f09b04230bbf4cb41a897fd1ed82671d2198edd769c207e35",
    ),
}
OF_LWE = {"lwe matrix", "lwe secret", "lwe error"}
"""Labels whose keys `tests/tenant/masking/test_lwe.py` compares."""


@pytest.mark.parametrize("label", KNOWN)
def test_a_key_has_its_known_answer(label: str) -> None:
    make, expected = KNOWN[label]
    key = make()
    assert (key.hex() if isinstance(key, bytes) else key) == expected


def test_every_label_has_a_known_answer() -> None:
    """A new key needs a row in `KNOWN`."""
    found = set()
    for path in (
        path for package in ("symbiosis_priv", "provider", "tenant") for path in (ROOT / package).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("derive", "stream"):
                found |= {arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)}
    assert found == KNOWN.keys() | OF_LWE
