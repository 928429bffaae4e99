"""Pads: every row is handed out once, every effect is its mask's product, and memory is limited."""

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import Keystream, StreamKey
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import DeadlineExceededError, SymbiosisError, VerificationError
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.connections.executor_client import joined
from tenant.core.pads import EffectSource, Pad, PadOrder, SessionSecret, Share
from tenant.preparation.prepared import Preparation
from tenant.session.supply import Supply
from tenant.worker import Promise
from tests.tenant.conftest import NewSession
from tests.tenant.scripted import product_of

TIMEOUT_S = 20.0
GROUP = GroupIndex(0)
LIMITS = wire.Welcome(
    version=wire.VERSION, model_digest="", first_group=0, end_group=9, max_rows=4096, max_payload=1 << 24
)


@pytest.fixture
def supply_of(new_session: NewSession) -> Callable[[int], Supply]:
    """The supply of a session with this much memory for pads."""

    def make(memory: int) -> Supply:
        session = new_session("local", pool_memory=memory)
        session.routes.executors[0].welcome = LIMITS
        return session.runtime.pads

    return make


def take(supply: Supply, index: int, direction: Direction, rows: int) -> Sequence[Pad]:
    """Take pads as a product does, and order as many for the next one."""
    pads = supply.take(GroupIndex(index), direction, rows)
    supply.order(GroupIndex(index), direction, rows)
    return pads


def settle(supply: Supply) -> None:
    """Wait for every ordered refill, and for the effects of the source's threads."""
    assert supply.source is not None
    for worker in (supply.refill, *supply.source.workers):
        worker.submit(lambda: None).result(TIMEOUT_S)


def mask_of(pads: Sequence[Pad], width: int) -> Tensor:
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


takes = st.lists(
    st.tuples(st.sampled_from((0, 1, 8)), st.sampled_from(DIRECTIONS), st.integers(1, 150), st.booleans()), max_size=12
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pattern=takes, memory=st.sampled_from((0, 1, 40_000, 1 << 18, 8 << 20)))
def test_no_pad_row_is_handed_out_twice_and_every_effect_is_its_masks_product(
    supply_of: Callable[[int], Supply],
    preparation: Preparation,
    store: WeightStore,
    pattern: list[tuple[int, Direction, int, bool]],
    memory: int,
) -> None:
    supply, masks = supply_of(memory), list[bytes]()
    for index, direction, rows, settled in pattern:
        pads = take(supply, index, direction, rows)
        assert supply._memory.used <= memory
        mask = mask_of(pads, preparation.facts[index].inputs(direction))
        assert len(mask) == rows
        assert torch.equal(joined(list(map(effect_of, pads))), product_of(store, index, direction, mask))
        masks += rows_of(mask)
        if settled:  # the next take finds the pool full; otherwise it races with the refill
            settle(supply)
    assert len(set(masks)) == len(masks)


def test_no_pad_row_is_handed_out_twice_under_threads(supply_of: Callable[[int], Supply]) -> None:
    """A session takes under one lock; refills and effects finish on other threads at any time."""
    interval, supply = sys.getswitchinterval(), supply_of(8 << 20)
    sys.setswitchinterval(1e-5)
    lock, masks = threading.Lock(), list[bytes]()

    def tenant(number: int) -> None:
        for rows in (1, 3, 40, 7, 64, 65, 2):
            with lock:
                pads = take(supply, 0, DIRECTIONS[number % 2], rows)
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


def test_no_more_is_drawn_ahead_than_was_ordered(supply_of: Callable[[int], Supply]) -> None:
    supply = supply_of(8 << 20)
    supply.take(GROUP, FORWARD, 8)
    ready = []
    for orders in ((), (70, 70, 64, 1), (5000,)):
        for rows in orders:
            supply.order(GROUP, FORWARD, rows)
        settle(supply)
        ready.append(supply.pools[0].ready())
    assert ready == [0, 70, 70 + 2 * 4096]  # a draw has 4096 rows at most


class Flaky(EffectSource):
    """Effects that fail on request, when a pad is drawn or later."""

    def __init__(self, preparation: Preparation, error: SymbiosisError, *, at_once: bool) -> None:
        super().__init__(preparation.facts, SessionSecret())
        self.error, self.at_once, self.away = error, at_once, True

    def draw(self, order: PadOrder) -> Pad:
        first, effect = self._burn(order), Promise[Tensor]()
        if not order.ahead or not self.away:
            effect.set_result(torch.zeros(order.rows, 1, dtype=torch.int32))
        elif self.at_once:
            raise self.error
        else:
            effect.set_exception(self.error)
        return Pad(order.rows, (Share(None, Keystream(StreamKey(bytes(32)), width=64), first, effect),))


LIE = VerificationError(provider="helper", group_name="g", direction=FORWARD, what="an effect")


@pytest.mark.parametrize(
    ("error", "at_once"), [(DeadlineExceededError("away"), True), (DeadlineExceededError("away"), False), (LIE, False)]
)
def test_a_pool_recovers_from_a_helper_that_was_away_but_keeps_a_malformed_effect(
    supply_of: Callable[[int], Supply], preparation: Preparation, error: SymbiosisError, at_once: bool
) -> None:
    """The fault is found when the malformed effect is used."""
    supply = supply_of(1 << 20)
    supply.source = source = Flaky(preparation, error, at_once=at_once)
    seen, failures = list[int](), set[BaseException | None]()
    for away in (True, True, False, False, False):
        source.away = away
        pads = take(supply, 0, FORWARD, 4)
        failures |= {share.effect.exception(TIMEOUT_S) for pad in pads for share in pad.shares}
        seen += [pad.shares[0].first_row + i for pad in pads for i in range(pad.rows)]
        settle(supply)
    assert failures == ({None, LIE} if error is LIE else {None})
    assert len(set(seen)) == len(seen) == 20
    assert supply.pools[0].ready() > 0
    assert supply._memory.used == sum(pad.rows for pad in supply.pools[0]._ready) * 4 * 128
