"""Keystream in the background: every slice once, tenants in turn, nothing for tenants that have left."""

import threading
import time

import torch

from provider.executor.rows import KeystreamMaker


def collect(maker: KeystreamMaker[str], count: int, woken: threading.Semaphore) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    deadline = time.monotonic() + 20
    while len(found) < count:
        assert woken.acquire(timeout=20)
        assert time.monotonic() < deadline
        found += maker.made()
    return found


def test_tenants_take_turns_and_errors_are_reported() -> None:
    woken, go_on = threading.Semaphore(0), threading.Event()
    maker: KeystreamMaker[str] = KeystreamMaker(woken.release)

    def blocked() -> torch.Tensor:
        assert go_on.wait(20)
        return torch.zeros(1, 1, dtype=torch.int32)

    def failing() -> torch.Tensor:
        raise ValueError

    maker.order("first", "alice", blocked)  # the other requests queue meanwhile
    for number in range(3):
        maker.order(f"alice {number}", "alice", lambda: torch.zeros(1, 1, dtype=torch.int32))
    maker.order("gone", "carol", lambda: torch.zeros(1, 1, dtype=torch.int32))
    maker.order("bob 0", "bob", failing)
    maker.forget("gone", "carol")
    go_on.set()
    made = collect(maker, 5, woken)
    names = [name for name, _ in made]
    assert names.index("bob 0") < names.index("alice 1")
    assert sorted(names) == ["alice 0", "alice 1", "alice 2", "bob 0", "first"]
    assert isinstance(dict(made)["bob 0"], ValueError)
    maker.close()
    maker.close()  # closing twice does nothing
