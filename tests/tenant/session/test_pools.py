"""Pads: every row is handed out once, every effect is its mask's product, and memory is limited."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import Keystream, StreamKey
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import DeadlineExceededError, VerificationError
from symbiosis_priv.limits import GroupIndex
from tenant.connections.executor_client import joined
from tenant.core.pads import EffectSource, Pad, PadOrder, SessionSecret, Share
from tenant.masking.registry import LocalSource
from tenant.preparation.prepared import Preparation
from tenant.session.supply import PadPool, PoolMemory
from tenant.worker import Promise, Worker
from tests.tenant.scripted import product_of

TIMEOUT_S = 20.0


def mask_of(pads: list[Pad], width: int) -> Tensor:
    """The masks of the pads, in order."""
    masks = [torch.zeros(pad.rows, width, dtype=torch.int32) for pad in pads]
    for pad, mask in zip(pads, masks, strict=True):
        pad.add_mask(mask)
    return joined(masks)


def effect_of(pad: Pad) -> Tensor:
    """The sum of a pad's effects, once they have arrived."""
    for share in pad.shares:
        share.effect.result(TIMEOUT_S)
    return torch.stack(pad.effects()).sum(dim=0, dtype=torch.int32)


def rows_of(masks: Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in masks]


class Ledger(PoolMemory):
    """A memory budget that records its peak."""

    peak = 0

    def take(self, size: int) -> bool:
        granted = super().take(size)
        self.peak = max(self.peak, self.used)
        return granted


class Pools:
    """A pool for every (layer group, direction) over one source, as in a session."""

    def __init__(self, source: EffectSource, preparation: Preparation, *, memory: int) -> None:
        self.source = source
        self.memory = Ledger(memory)
        self._facts = preparation.facts
        self._refill = Worker("refill")
        self._pools: dict[tuple[int, Direction], PadPool] = {}

    def pool(self, index: int, direction: Direction) -> PadPool:
        facts = self._facts[index]
        return self._pools.setdefault(
            (index, direction),
            PadPool(
                self.source,
                index=GroupIndex(index),
                direction=direction,
                refill=self._refill,
                memory=self.memory,
                row_bytes=4 * (facts.entry.inputs + facts.entry.stacked_outputs),
                max_rows=lambda: 4096,
            ),
        )

    def take(self, index: int, direction: Direction, rows: int) -> list[Pad]:
        """Take pads as a product does, and order as many for the next one."""
        pool = self.pool(index, direction)
        pads = pool.take(rows)
        pool.order(rows)
        return pads

    def settle(self) -> None:
        """Wait for every ordered refill, and for the effects of the source's threads."""
        for worker in (self._refill, *self.source.workers):
            worker.submit(lambda: None).result(TIMEOUT_S)

    def close(self) -> None:
        for worker in (self._refill, *self.source.workers):
            worker.stop()
            assert worker.join(TIMEOUT_S)


@pytest.fixture
def local(preparation: Preparation, store: WeightStore) -> Iterator[Pools]:
    pools = Pools(LocalSource(preparation.facts, SessionSecret(), store), preparation, memory=8 << 20)
    yield pools
    pools.close()


takes = st.lists(
    st.tuples(st.sampled_from((0, 1, 8)), st.sampled_from(DIRECTIONS), st.integers(1, 150), st.booleans()), max_size=12
)


@given(pattern=takes, memory=st.sampled_from((0, 1, 40_000, 1 << 18, 8 << 20)))
def test_no_pad_row_is_handed_out_twice_and_every_effect_is_its_masks_product(
    preparation: Preparation, store: WeightStore, pattern: list[tuple[int, Direction, int, bool]], memory: int
) -> None:
    pools = Pools(LocalSource(preparation.facts, SessionSecret(), store), preparation, memory=memory)
    masks: list[bytes] = []
    for index, direction, rows, settled in pattern:
        pads = pools.take(index, direction, rows)
        mask = mask_of(pads, preparation.facts[index].inputs(direction))
        effect = joined([effect_of(pad) for pad in pads])
        assert len(mask) == rows
        assert torch.equal(effect, product_of(store, index, direction, mask))
        masks += rows_of(mask)
        if settled:  # the next take finds the pool full; otherwise it races with the refill
            pools.settle()
    assert len(set(masks)) == len(masks)
    assert pools.memory.peak <= memory
    pools.close()


def test_no_pad_row_is_handed_out_twice_under_threads(local: Pools) -> None:
    """A session takes under one lock; refills and effects finish on other threads at any time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    lock, masks = threading.Lock(), []

    def tenant(number: int) -> None:
        for rows in (1, 3, 40, 7, 64, 65, 2):
            with lock:
                pads = local.take(0, DIRECTIONS[number % 2], rows)
            for pad in pads:
                assert len(effect_of(pad)) == pad.rows
            masks.extend(rows_of(mask_of(pads, (64, 128)[number % 2])))

    try:
        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(tenant, number) for number in range(8)]:
                done.result(TIMEOUT_S)
    finally:
        sys.setswitchinterval(interval)
    assert len(masks) == 8 * 182
    assert len(set(masks)) == len(masks)


def test_no_more_is_drawn_ahead_than_was_ordered(local: Pools) -> None:
    pool = local.pool(0, FORWARD)
    pool.take(8)
    local.settle()
    assert pool.ready() == 0  # nothing was ordered
    for rows in (70, 70, 64, 1):
        pool.order(rows)
    local.settle()
    assert pool.ready() == 70
    pool.order(5000)  # a draw has 4096 rows at most
    local.settle()
    assert pool.ready() == 70 + 2 * 4096


class Flaky(EffectSource):
    """Effects that fail on request."""

    def __init__(self, preparation: Preparation, error: Exception, *, at_once: bool = False) -> None:
        super().__init__(preparation.facts, SessionSecret())
        self.error, self.at_once, self.away = error, at_once, True
        self.drawn: list[tuple[int, bool]] = []

    def draw(self, order: PadOrder) -> Pad:
        rows, ahead = order.rows, order.ahead
        first = self._burn(order)
        self.drawn.append((rows, ahead))
        effect: Promise[Tensor] = Promise()
        if ahead and self.away:
            if self.at_once:
                raise self.error
            effect.set_exception(self.error)
        else:
            effect.set_result(torch.zeros(rows, 1, dtype=torch.int32))
        return Pad(rows, (Share(None, Keystream(StreamKey(bytes(32)), width=64), first, effect),))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_pool_recovers_from_a_helper_that_was_away(preparation: Preparation, at_once: bool) -> None:
    source = Flaky(preparation, DeadlineExceededError("away"), at_once=at_once)
    pools = Pools(source, preparation, memory=1 << 20)
    pool = pools.pool(0, FORWARD)
    seen: list[int] = []
    for away in (True, True, False, False, False):
        source.away = away
        pads = pools.take(0, FORWARD, 4)
        assert all(share.effect.exception(TIMEOUT_S) is None for pad in pads for share in pad.shares)
        seen += [pad.shares[0].first_row + i for pad in pads for i in range(pad.rows)]
        pools.settle()
    assert len(set(seen)) == len(seen) == 20
    assert pool.dry < pool.taken  # the last pads came from the pool
    assert pools.memory.used == sum(pad.rows for pad in pool._ready) * 4 * (64 + 128)
    pools.close()


def test_a_malformed_effect_in_the_pool_is_not_dropped(preparation: Preparation) -> None:
    lie = VerificationError(provider="helper", group_name="g", direction=FORWARD, what="an effect")
    pools = Pools(Flaky(preparation, lie), preparation, memory=1 << 20)
    pools.take(0, FORWARD, 4)
    pools.settle()
    (pad,) = pools.take(0, FORWARD, 4)
    assert pad.shares[0].effect.exception(TIMEOUT_S) is lie
    pools.close()
