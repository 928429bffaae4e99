"""Slots for connections: never too many, and shared between tenants."""

import contextlib
import math
from collections import Counter

import torch
from hypothesis import example, given, strategies as st

from provider.config.schema import Limits
from provider.gateway.admission import Slot, Slots
from provider.refusal import Refusal
from provider.serve import Provider
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity
from tests.provider.clients import execute, failure
from tests.provider.conftest import Configure, Connect

TENANTS = [TenantIdentity(name, authority="sha256:a") for name in "abcd"]
LIMITS = Limits(max_connections=6, max_connections_per_tenant=4)


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.booleans()), max_size=40))
@example([(TENANTS[0], False)] * 5)
def test_slots_are_limited_and_shared_between_tenants(arriving: list[tuple[TenantIdentity, bool]]) -> None:
    """The idlest connection of the tenant with the most is closed, and only for a tenant that has fewer."""
    slots = Slots(LIMITS)
    present: dict[Slot, contextlib.ExitStack] = {}

    def held(tenant: TenantIdentity) -> list[Slot]:
        return [slot for slot in present if slot.tenant == tenant]

    for tenant, busy in arriving:
        counts, closed, stack = Counter(slot.tenant for slot in present), list[Slot](), contextlib.ExitStack()

        def close(found: list[Slot] = closed) -> None:
            found.extend(slot for slot in present if slot not in _held_by(slots))
            for slot in found:
                present.pop(slot).close()

        own, most = counts[tenant], max(counts.values(), default=0)
        for slot in present:
            slot.close = close
        before = list(present)
        try:
            slot = stack.enter_context(slots.taken(tenant, close))
        except Refusal:
            assert own == 4 or (len(before) == 6 and most < own + 2)
            continue
        assert own < 4
        if len(before) == 6:
            (gone,) = closed
            assert counts[gone.tenant] == most >= own + 2
            busiest = [slot for slot in before if counts[slot.tenant] == most]
            assert gone.idle_since == min(slot.idle_since for slot in busiest)
        else:
            assert closed == []
        present[slot] = stack
        if busy:
            slot.idle_since = math.inf
        assert len(present) <= 6
        assert all(slots.count(tenant) == len(held(tenant)) for tenant in TENANTS)
    for stack in present.values():
        stack.close()
    assert not any(map(slots.count, TENANTS))


def _held_by(slots: Slots) -> list[Slot]:
    return [slot for held in slots._held.values() for slot in held]


def test_idle_connections_do_not_shut_out_other_tenants(configure: Configure, connect: Connect) -> None:
    """Four tenants with all their permitted connections could take every slot of a provider."""
    rows = torch.ones(1, 64, dtype=torch.int32)
    with Provider(configure(max_connections=6, max_connections_per_tenant=2)) as provider:
        crowd = {name: [connect(name, to=provider) for _ in range(2)] for name in ("alice", "bob", "dave")}
        for name in ("bob", "dave", "alice"):
            crowd[name][0].product(execute(0, 1), rows)  # its second connection is idle for longer
        carol = connect("carol", to=provider)
        carol.product(execute(0, 1), rows)
        assert crowd["alice"][1].at_end()
        for name, which in (("alice", 0), ("bob", 0), ("bob", 1), ("dave", 0), ("dave", 1)):
            crowd[name][which].product(execute(0, 1), rows)
        # bob and dave have no more connections than carol would have
        assert failure(connect("carol", to=provider, role=None).receive()[0]) == wire.ErrorCode.BUSY
        carol.product(execute(0, 1), rows)
