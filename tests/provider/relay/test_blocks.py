"""The executor's blocks: no row is used twice, no tenant reaches another tenant's block, and memory is bounded."""

import contextlib
import secrets
from typing import Any

import pytest
from hypothesis import given, strategies as st

from provider.refusal import Refusal
from provider.relay.blocks import LIFETIME_S, PERMIT_S, BlockStore, Permits
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity
from symbiosis_priv.network.wire import ErrorCode

ALICE, BOB, CAROL = (TenantIdentity(name, authority="sha256:a") for name in ("alice", "bob", "carol"))
HELPER = "sha256:" + 64 * "b"
ROWS, SIZE = 4, 48
MEMORY = 40_000
BINDING: dict[str, Any] = {"group": 0, "direction": "forward", "arithmetic": "ring"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def deposit(block: bytes, *, rows: int = ROWS, **fields: Any) -> wire.Deposit:
    return wire.Deposit(nonce=block, rows=rows, permit=bytes(32), signature=b"s", **BINDING | fields)


def put(store: BlockStore, tenant: TenantIdentity, block: bytes, **fields: Any) -> None:
    with store.arriving(tenant, deposit(block, **fields), helper=HELPER, size=SIZE) as kept:
        store.keep(tenant, kept, memoryview(block.ljust(SIZE, b"\0")))


def execute(*parts: wire.BlockRows, nonce: bytes | None = None, rows: int = ROWS, **fields: Any) -> wire.Execute:
    return wire.Execute(nonce=nonce or secrets.token_bytes(16), rows=rows, blocks=parts, **BINDING | fields)


def part(block: bytes, *, start: int = 0, first: int = 0, rows: int = ROWS) -> wire.BlockRows:
    return wire.BlockRows(block=block, start=start, first=first, rows=rows)


ids = st.sampled_from([bytes([n]) * 16 for n in range(6)])
tenants = st.sampled_from([ALICE, BOB])
named_rows = st.lists(st.tuples(ids, st.integers(0, ROWS), st.integers(0, ROWS)), min_size=1, max_size=3)
steps = st.one_of(
    st.tuples(st.just("put"), tenants, ids),
    st.tuples(st.just("abandon"), tenants, ids),
    st.tuples(st.just("take"), tenants, named_rows, st.integers(0, 2)),
    st.tuples(st.just("confirm"), tenants, st.integers(0, 9)),
    st.tuples(st.just("end"), st.integers(0, 2)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, LIFETIME_S])),
)


@given(st.lists(steps, max_size=40))
def test_any_sequence_uses_each_row_once_and_keeps_evidence(sequence: list[tuple[Any, ...]]) -> None:
    clock = Clock()
    store = BlockStore(MEMORY, clock)
    generation: dict[tuple[TenantIdentity, bytes], int] = {}  # a block with the id of a dropped block is another block
    used: set[tuple[TenantIdentity, bytes, int, int]] = set()
    open_uses: list[tuple[TenantIdentity, wire.Execute, int]] = []  # used, not confirmed, on a live connection
    nonces: list[bytes] = []
    for step in sequence:
        match step:
            case "put", tenant, block:
                with contextlib.suppress(Refusal):
                    put(store, tenant, block)
                    generation[tenant, block] = generation.get((tenant, block), 0) + 1
            case "abandon", tenant, block:
                with contextlib.suppress(Refusal), store.arriving(tenant, deposit(block), helper=HELPER, size=SIZE):
                    pass
            case "take", tenant, named, connection:
                request = execute(*(part(block, start=start, rows=rows) for block, start, rows in named))
                nonces.append(request.nonce)
                taken = store.take(tenant, request, connection=connection, timeout=0)
                if taken is None:
                    continue
                open_uses.append((tenant, request, connection))
                for each, payload in taken:
                    assert bytes(payload[:16]) == each.block
                    for row in range(each.start, each.start + each.rows):
                        assert row < ROWS
                        once = tenant, each.block, generation[tenant, each.block], row
                        assert once not in used
                        used.add(once)
            case "confirm", tenant, number:
                confirmed = nonces[number : number + 1]
                store.confirm(tenant, confirmed)
                open_uses = [use for use in open_uses if use[0] != tenant or use[1].nonce not in confirmed]
            case "end", connection:
                store.end(connection)
                open_uses = [use for use in open_uses if use[2] != connection]
            case "wait", seconds:
                clock.now += seconds
        for tenant, request, _ in open_uses:
            for each in request.blocks:
                assert store.fetch(tenant, each.block).payload is not None
        assert 0 <= store.counts().bytes <= MEMORY
    for connection in range(3):
        store.end(connection)
    clock.now += LIFETIME_S
    assert store.counts().blocks == store.counts().bytes == 0


def test_a_used_block_is_kept_while_its_connection_lives() -> None:
    """A tenant whose machine slept must not find the evidence gone: it would blame the executor."""
    clock, block, spare = Clock(), bytes(16), b"1" * 16
    store = BlockStore(MEMORY, clock)
    put(store, ALICE, block)
    put(store, ALICE, spare)
    assert store.take(ALICE, execute(part(block)), connection="first", timeout=0)
    clock.now += 10 * LIFETIME_S
    assert store.fetch(ALICE, block).helper == HELPER
    with pytest.raises(Refusal):
        store.fetch(ALICE, spare)
    store.end("first")
    with pytest.raises(Refusal):
        store.fetch(ALICE, block)


def test_a_block_that_does_not_fit_the_request_is_not_used() -> None:
    store, block = BlockStore(MEMORY), bytes(16)
    put(store, ALICE, block)
    wrong: list[wire.Execute] = [
        execute(part(block), group=1),
        execute(part(block), direction="backward"),
        execute(part(block), ring_bits=24),
        execute(part(block), counts=(2, 2)),
        execute(part(block, start=1)),
        execute(part(block, first=1)),
        execute(part(block, rows=0)),
        execute(part(block), part(block)),
        execute(part(block), part(bytes(15) + b"1")),
    ]
    for request in wrong:
        assert store.take(ALICE, request, connection=0, timeout=0) is None, request
    assert store.take(BOB, execute(part(block)), connection=0, timeout=0) is None
    assert store.take(ALICE, execute(part(block)), connection=0, timeout=0) is not None
    assert store.counts().missed == len(wrong) + 1


def test_a_tenant_that_never_uses_its_blocks_leaves_room_for_others() -> None:
    store = BlockStore(MEMORY)

    def fill(tenant: TenantIdentity) -> int:
        for number in range(100):
            try:
                put(store, tenant, bytes([number]) * 16)
            except Refusal:
                return number
        raise AssertionError

    shares = [fill(tenant) for tenant in (ALICE, BOB, CAROL)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] > 0
    free = MEMORY - store.counts().bytes
    assert free > MEMORY // 8 - store.counts().bytes // sum(shares)


def test_a_block_is_refused_before_its_memory_is_taken() -> None:
    store = BlockStore(MEMORY)
    with pytest.raises(Refusal), store.arriving(ALICE, deposit(bytes(16)), helper=HELPER, size=MEMORY):
        raise AssertionError
    assert store.counts().bytes == 0


# Permits


def test_permits_name_helpers_and_expire() -> None:
    clock = Clock()
    permits = Permits(frozenset({HELPER}), clock)
    token, named = permits.issue(ALICE, ["sha256:other", HELPER])
    assert named == (HELPER,)
    assert permits.tenant_of(token, helper=HELPER) == ALICE
    for other_token, helper in ((token, "sha256:other"), (bytes(32), HELPER)):
        with pytest.raises(Refusal):
            permits.tenant_of(other_token, helper=helper)
    with pytest.raises(Refusal) as refused:
        permits.issue(ALICE, ["sha256:other"])
    assert refused.value.code == ErrorCode.NOT_SERVED
    assert permits.has_permit(ALICE)
    assert not permits.has_permit(BOB)
    clock.now += PERMIT_S
    assert not permits.has_permit(ALICE)
    with pytest.raises(Refusal):
        permits.tenant_of(token, helper=HELPER)


def test_a_tenant_has_a_limited_number_of_permits() -> None:
    permits = Permits(frozenset({HELPER}))
    bobs, _ = permits.issue(BOB, [HELPER])
    tokens = [permits.issue(ALICE, [HELPER])[0] for _ in range(100)]
    assert permits.tenant_of(tokens[-1], helper=HELPER) == ALICE
    assert permits.tenant_of(bobs, helper=HELPER) == BOB
    with pytest.raises(Refusal):
        permits.tenant_of(tokens[0], helper=HELPER)
