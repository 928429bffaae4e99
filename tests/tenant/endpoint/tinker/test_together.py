"""The products of the passes of a round are one product."""

import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction
from symbiosis_priv.errors import NonFiniteError
from tenant.endpoint.engine.queued import Turn
from tenant.endpoint.tinker import together
from tenant.endpoint.tinker.together import Together
from tenant.masking.backend import Backend, Product
from tests.waiting import beside


class Doubling(Backend):
    """Doubles rows, and counts the rows of each product."""

    facts = ()

    def __init__(self) -> None:
        self.counts: list[int] = []

    def compute(self, product: Product) -> None:
        if not product.inputs[0].isfinite().all():
            raise NonFiniteError
        self.counts.append(len(product.inputs[0]))
        product.outputs[0].copy_(2 * product.inputs[0])

    def close(self) -> None:
        pass


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Doubling:
    monkeypatch.setattr(together, "ledger_of", lambda _: None)
    return Doubling()


def test_the_products_of_all_passes_are_one(backend: Doubling) -> None:
    """Also if a pass skips a product, and if the rows of one have inf: then that pass alone fails."""
    merged = Together(nn.Identity(), backend, Turn())
    merged.active = 3
    results: list[Any] = [None] * 3

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
                except NonFiniteError:
                    results[number] = "inf"
                else:
                    assert torch.equal(out, 2 * rows)

    with beside(*(lambda n=n: one(n) for n in range(3))):
        pass
    assert results == ["inf", None, None]
    assert backend.counts[:2] == [6, 3]
    assert sorted(backend.counts[2:]) == [2, 3]  # each pass alone, without the one with inf


def test_nobody_waits_for_a_pass_that_failed(backend: Doubling) -> None:
    merged, entered = Together(nn.Identity(), backend, Turn()), threading.Event()
    merged.active = 2

    def waits() -> None:
        out: Tensor = torch.empty(1, 4)
        with merged.taking_part():
            entered.set()
            merged.multiply(0, FORWARD, [torch.ones(1, 4)], [out])
        assert torch.equal(out, torch.full((1, 4), 2.0))

    def fails() -> None:
        with suppress(KeyError), merged.taking_part():
            entered.wait(60)
            raise KeyError

    with beside(waits, fails):
        pass
