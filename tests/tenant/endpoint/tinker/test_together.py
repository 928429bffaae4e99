"""The products of the passes of a round are one product."""

import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction
from symbiosis_priv.errors import NonFiniteError
from tenant.endpoint.engine.queued import Turn
from tenant.endpoint.tinker import together
from tenant.endpoint.tinker.together import Together
from tenant.masking.backend import Product
from tests.waiting import beside


@pytest.fixture
def counts() -> list[int]:
    """The rows of each product."""
    return []


@pytest.fixture
def merged(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> Together:
    """Its products are the rows, doubled."""

    def compute(product: Product) -> None:
        if not product.inputs[0].isfinite().all():
            raise NonFiniteError
        counts.append(len(product.inputs[0]))
        product.outputs[0].copy_(2 * product.inputs[0])

    monkeypatch.setattr(together, "ledger_of", lambda _: None)
    backend: Any = SimpleNamespace(facts=(), compute=compute)
    return Together(nn.Identity(), backend, Turn())


def test_the_products_of_all_passes_are_one(merged: Together, counts: list[int]) -> None:
    """Also if a pass skips a product, and if the rows of one have inf: then that pass alone fails."""
    merged.active, failed = 3, list[int]()

    def one(number: int) -> None:
        with merged.taking_part():
            products: list[tuple[int, Direction]] = [(0, FORWARD), (1, FORWARD), (1, BACKWARD)]
            for group, direction in products:
                if (number, group, direction) == (2, 1, FORWARD):
                    continue
                rows = torch.full((number + 1, 4), torch.inf if (number, direction) == (0, BACKWARD) else 1.0 + number)
                out = torch.empty_like(rows)
                try:
                    merged.multiply(group, direction, [rows], [out])
                    assert torch.equal(out, 2 * rows)
                except NonFiniteError:
                    failed.append(number)

    with beside(*(lambda n=n: one(n) for n in range(3))):
        pass
    assert failed == [0]
    assert counts[0] == 6
    assert sorted(counts[1:]) == [2, 3, 3]  # two passes, the pass that is ahead, and one pass without the one with inf


def test_nobody_waits_for_a_pass_that_failed(merged: Together, counts: list[int]) -> None:
    merged.active, entered = 2, threading.Event()

    def waits() -> None:
        with merged.taking_part():
            entered.set()
            merged.multiply(0, FORWARD, [torch.ones(1, 4)], [torch.empty(1, 4)])

    def fails() -> None:
        with suppress(KeyError), merged.taking_part():
            entered.wait(60)
            raise KeyError

    with beside(waits, fails):
        pass
    assert counts == [1]
