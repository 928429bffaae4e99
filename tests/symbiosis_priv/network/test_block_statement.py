"""Blocks of relayed effects: one id stands for one matrix."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from symbiosis_priv.arithmetic.keystream import Seed
from symbiosis_priv.network import wire
from symbiosis_priv.network.block_statement import block_id

ORDER = wire.RelayOrder(permit=bytes(32), executor="sha256:" + 64 * "0")
EFFECT = wire.Effect(
    nonce=bytes(16),
    group=1,
    direction="forward",
    arithmetic="ring",
    rows=12,
    counts=(1, 11),
    seed=Seed(bytes(32)),
    first_row=3,
    relay=ORDER,
)
OTHER: dict[str, Any] = {
    "group": 2,
    "direction": "backward",
    "rows": 121,
    "counts": (11, 1),
    "ring_bits": 24,
    "seed": bytes([1]) * 32,
    "first_row": 31,
    "relay": msgspec.structs.replace(ORDER, executor="sha256:" + 64 * "1"),
}


@given(st.sets(st.sampled_from(sorted(OTHER)), min_size=1))
def test_whatever_decides_the_matrix_decides_the_id(names: set[str]) -> None:
    other = msgspec.structs.replace(EFFECT, **{name: OTHER[name] for name in names})
    assert block_id(other) != block_id(EFFECT)
    one, other = (msgspec.structs.replace(EFFECT, counts=counts) for counts in (None, ()))
    assert block_id(one) != block_id(other)


def test_a_request_that_is_repeated_orders_the_same_block() -> None:
    renewed = msgspec.structs.replace(ORDER, permit=bytes([1]) * 32)
    again = msgspec.structs.replace(EFFECT, nonce=bytes([1]) * 16, relay=renewed)
    assert block_id(again) == block_id(EFFECT)
    assert len(block_id(EFFECT)) == wire.NONCE_BYTES
