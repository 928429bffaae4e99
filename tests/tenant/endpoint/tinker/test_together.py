"""The products of the passes of a round are one product."""

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

    def one(number: int) -> bool:
        products: list[tuple[int, Direction]] = [(0, FORWARD), (1, FORWARD), (1, BACKWARD)]
        for group, direction in products:
            if (number, group, direction) == (2, 1, FORWARD):
                continue
            rows = torch.full((number + 1, 4), torch.inf if (number, direction) == (0, BACKWARD) else 1.0 + number)
            out = torch.empty_like(rows)
            try:
                merged.multiply(group, direction, [rows], [out])
            except NonFiniteError:
                return False
            assert torch.equal(out, 2 * rows)
        return True

    assert [one.result(60) for one in merged.run(one, range(3))] == [False, True, True]
    assert counts[0] == 6
    assert sorted(counts[1:]) == [2, 3, 3]  # two passes, the pass that is ahead, and one pass without the one with inf


def test_nobody_waits_for_a_pass_that_failed(merged: Together, counts: list[int]) -> None:
    def one(fails: bool) -> None:
        if fails:
            raise KeyError
        merged.multiply(0, FORWARD, [torch.ones(1, 4)], [torch.empty(1, 4)])

    waits, failed = merged.run(one, [False, True])
    assert isinstance(failed.exception(60), KeyError)
    assert waits.result(60) is None
    assert counts == [1]
