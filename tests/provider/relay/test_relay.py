"""A helper relays effects to an executor over real connections, and everything that must not work does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.network import wire

if TYPE_CHECKING:
    from tests.provider.relay.conftest import NewTenant


def ring_rows(rows: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(-(2**31), 2**31, (rows, width), generator=generator, dtype=torch.int32, device="cpu")


def low(matrix: torch.Tensor, bits: int) -> torch.Tensor:
    return matrix & ((1 << bits) - 1)


@pytest.mark.parametrize("ring_bits", [32, 24])
def test_blocks_are_subtracted_and_only_the_tenant_can_open_the_answer(
    new_tenant: NewTenant, ring_bits: wire.RingBits
) -> None:
    tenant = new_tenant()
    for direction in DIRECTIONS:
        effect = tenant.relay(1, 5, first_row=7, direction=direction, ring_bits=ring_bits)
        e, m = tenant.matrices(effect)
        rows = ring_rows(5, tenant.width(effect))
        reply, answer = tenant.product(rows, effect)
        assert reply.relayed
        opened = answer + m
        assert torch.equal(low(opened, ring_bits), low(tenant.times(rows, effect) - e, ring_bits))
