"""Rows on a GPU are copied to the host and back through page-locked memory, with the same bits."""

from typing import Any

import pytest
import torch

from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from tenant.core.parts import Rows
from tenant.masking.backend import RingBackend, _on_host
from tenant.preparation.prepared import Preparation


class _NoProduct:
    """Keeps the rows, and leaves the results as they are."""

    rows: Any = None

    def multiply(self, index: int, direction: Direction, rows: Rows) -> None:
        self.rows = rows

    def close(self) -> None:
        pass


def test_tensors_on_the_host_are_not_copied(preparation: Preparation) -> None:
    products = _NoProduct()
    inputs, outputs = (torch.randn(2, width) for width in preparation.manifest.groups[0].columns(FORWARD))
    RingBackend(preparation.facts, products).multiply(0, FORWARD, [inputs], [outputs])
    assert products.rows.inputs[0] is inputs
    assert products.rows.outputs[0] is outputs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_between_the_devices_wait_for_each_other() -> None:
    for _ in range(20):
        parts = [torch.randn(rows, 4096, device="cuda", requires_grad=True) for rows in (1, 700)]
        near = _on_host(parts)
        assert all(part.is_pinned() for part in near)
        assert all(torch.equal(here, there.detach().cpu()) for here, there in zip(near, parts, strict=True))
