"""Relay of effects: the same bits as without it, half the bytes, and only liars are named."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings, strategies as st
from torch import Tensor

from symbiosis_priv.arithmetic.ring import BACKWARD, DIRECTIONS, FORWARD
from symbiosis_priv.errors import RoleConflictError, VerificationError
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from symbiosis_priv.network.block_statement import block_id
from tenant.core.masked import Gate
from tenant.routing.routes import Routes
from tenant.session import supply
from tenant.session.session import Session
from tests.simulator import Stored
from tests.tenant.conftest import NewProvider, NewSession, Scripted
from tests.tenant.scripted import Heard, ScriptedProvider, frame, is_right

OUT = GroupIndex(1)
Kept = tuple[wire.Block, bytes]
"""A block as an executor keeps it."""
PATIENT_S = 20.0


def relayed(session: Session) -> tuple[int, int]:
    """Rows opened with blocks, and all rows."""
    ledger = session.ledger()
    return ledger.rows_relayed, ledger.rows


@pytest.fixture
def executor(new_provider: NewProvider) -> ScriptedProvider:
    provider = new_provider()
    provider.block_wait_s = PATIENT_S
    return provider


# The usual way


@pytest.mark.parametrize("helpers", [1, 2])
def test_the_tenant_receives_one_matrix_whatever_the_number_of_helpers(scripted: Scripted, helpers: int) -> None:
    """Blocks of pads that were split, and of pads that were drawn now, forward and backward."""
    session = scripted.new_session("relay", helpers=[scripted.new_provider() for _ in range(helpers)])
    for seed, count in enumerate((3, 5, 1, 70, 2)):
        for direction in DIRECTIONS:
            assert is_right(session, OUT, direction, count, seed)
    assert relayed(session) == (162, 162)
    ledger, facts = session.ledger(), session.preparation.facts[OUT]
    answers = 81 * 4 * (facts.outputs(FORWARD) + facts.outputs(BACKWARD))
    assert answers < ledger.bytes_from_executors < answers + 3000
    channels = 4 * helpers  # each has received a welcome and a key
    assert ledger.bytes_from_helpers < 300 * (ledger.helper_round_trips + 2) + 1200 * channels


def test_the_executor_is_told_which_answers_were_right(executor: ScriptedProvider, new_session: NewSession) -> None:
    session = new_session("relay")
    for seed in range(4):
        assert is_right(session, OUT, FORWARD, 2, seed)
    requests = [h.request for h in executor.executed if isinstance(h.request, wire.Execute)]
    assert [request.confirms for request in requests] == [(), *((request.nonce,) for request in requests[:-1])]


def test_what_hides_an_effect_is_fresh_for_every_row(
    executor: ScriptedProvider, helper: ScriptedProvider, new_session: NewSession
) -> None:
    session = new_session("relay")
    for seed in range(3):
        assert is_right(session, OUT, FORWARD, 40, seed)

    def matrices(heard: Heard) -> list[Tensor]:
        assert isinstance(heard.request, wire.Effect)
        _, body = executor.blocks.get(block_id(heard.request), (None, b""))
        return [wire.RING32.unpack(bytearray(body), rows=heard.request.rows)] if body else []

    seconds = torch.cat([matrix - helper.product(heard) for heard in helper.effects for matrix in matrices(heard)])
    assert len(seconds) >= 120
    assert len(seconds.unique()) > 0.99 * seconds.numel()


# The direct way instead


def forgets(executor: ScriptedProvider, helper: ScriptedProvider) -> None:
    executor.block_wait_s = 0.0
    executor.blocks = Forgetful()


class Forgetful(dict[bytes, Any]):
    def __setitem__(self, key: bytes, value: Any) -> None:
        pass


def allows_no_helper(executor: ScriptedProvider, helper: ScriptedProvider) -> None:
    executor.takes_blocks = False


def is_old(executor: ScriptedProvider, helper: ScriptedProvider) -> None:
    refusal = wire.Failure(code=wire.ErrorCode.BAD_REQUEST, detail="this provider speaks versions 3 and 4, not 5")
    executor.refusal = lambda hello: refusal if hello.version > wire.NARROW_VERSION else None


def has_a_helper_that_refuses(executor: ScriptedProvider, helper: ScriptedProvider) -> None:
    def refuse(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        if isinstance(heard.request, wire.Effect) and heard.request.relay is not None:
            return frame(wire.Failure(code=wire.ErrorCode.REFUSED, detail="no link to this executor"))
        return frame(reply, answer)

    executor.block_wait_s = 0.0
    helper.behaviour = refuse


def has_a_helper_without_a_link(executor: ScriptedProvider, helper: ScriptedProvider) -> None:
    executor.block_wait_s = 0.0
    helper.links = {}


@pytest.mark.parametrize(
    "trouble",
    [forgets, allows_no_helper, is_old, has_a_helper_that_refuses, has_a_helper_without_a_link],
)
def test_without_blocks_effects_come_directly_and_bits_are_the_same(
    executor: ScriptedProvider, new_provider: NewProvider, new_session: NewSession, trouble: Callable[..., None]
) -> None:
    helpers = [new_provider(), new_provider()]
    trouble(executor, helpers[0])
    session = new_session("relay", helpers=helpers)
    for seed in range(3):
        assert is_right(session, OUT, FORWARD, 3, seed)
    assert relayed(session) == (0, 9)
    assert not session.routes.quarantined
    assert [provider.health.failures for provider in (*session.routes.executors, *session.routes.helpers)] == [0, 0, 0]


def test_an_executor_that_issues_no_permit_does_not_delay_every_pad(
    executor: ScriptedProvider, new_session: NewSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply, "_PERMIT_S", 0.3)
    executor.issues_permits = False
    session = new_session("relay", pool_memory=0)
    for seed in range(6):
        assert is_right(session, OUT, FORWARD, 3, seed)
    assert executor.permits_asked == 1


@pytest.mark.parametrize("limit", ["rows", "bytes"])
def test_no_block_is_ordered_that_the_executor_would_refuse(
    new_provider: NewProvider, new_session: NewSession, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Another executor takes larger requests, so pads have more rows than this one accepts."""
    executors, helper = [new_provider(max_rows=4 if limit == "rows" else 4096), new_provider()], new_provider()
    session = new_session("relay", executors, [helper], pool_memory=0)
    if limit == "bytes":
        executors[0].max_bytes = 4 * wire.RING32.size(1, session.preparation.facts[OUT].outputs(FORWARD))
    monkeypatch.setattr(session.routes, "likely", lambda group: session.routes.executors[0])
    for count in (6, 4):
        assert is_right(session, OUT, FORWARD, count)
    orders = [h.request for h in helper.effects if isinstance(h.request, wire.Effect) and h.request.relay]
    assert [order.rows for order in orders] == [4]


def test_pads_for_a_lost_executor_are_opened_directly_at_another_one(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors, helper = [scripted.new_provider(), scripted.new_provider()], scripted.new_provider()
    lost, other = executors
    session = scripted.new_session("relay", executors, [helper])
    monkeypatch.setattr(session.routes, "likely", lambda group: session.routes.executors[0])  # blocks are for `lost`
    while not session.ledger().rows_relayed:  # pads that were drawn before there was a permit come first
        assert is_right(session, OUT, FORWARD, 2, 0)
    lost.behaviour = lambda *_: None
    before, drawn = len(lost.executed), len(helper.effects)
    while len(lost.executed) == before:
        assert is_right(session, OUT, FORWARD, 2, 9)
    assert lost.executed[-1].payload == other.executed[-1].payload
    fetched = [h.request for h in helper.effects[drawn:] if isinstance(h.request, wire.Effect) and not h.request.relay]
    assert any(request.rows == 2 for request in fetched)  # of the pad's rows only
    assert session.ledger().pads_redrawn == 0


# Rule 8


def test_no_block_is_ordered_for_an_executor_of_the_helpers_company(
    new_provider: NewProvider, new_session: NewSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: routing ignores rule 8. The gate stops the order; without the gate, the helper would receive it."""
    executor, other, helper, spare = (new_provider() for _ in range(4))
    monkeypatch.setattr(Routes, "holders", lambda self, *args, **kwargs: [self.helpers[0]])

    def product(stopped: str, effects: int) -> None:
        session = new_session(
            "relay",
            [executor.peer("executor", operator="A"), other.peer("executor", operator="D")],
            [helper.peer("helper", operator="A"), spare.peer("helper", operator="C")],
            pad_helpers=1,
        )
        monkeypatch.setattr(session.routes, "likely", lambda group: session.routes.executors[0])
        with pytest.raises(RoleConflictError, match=stopped):
            session.product(GroupIndex(1), FORWARD, torch.zeros(1, 64, dtype=torch.int32))
        deadline = time.monotonic() + PATIENT_S
        while len(helper.effects) < effects and time.monotonic() < deadline:
            time.sleep(0.01)
        session.close()

    monkeypatch.setattr(Routes, "_admissible", lambda self, executors, holders: list(executors))
    monkeypatch.setattr(Routes, "_best", lambda self, open_ones, *args: next(iter(open_ones), None))
    product("to relay", 0)
    assert helper.effects == executor.executed == []
    monkeypatch.setattr(Gate, "check_relay", lambda *_: None)
    product("get rows", 1)
    assert [h.request.relay is not None for h in helper.effects if isinstance(h.request, wire.Effect)] == [True]


# Blame


def another(heard: Heard, reply: wire.Result, answer: Tensor) -> Tensor:
    """An error of 2^29, which passes the columns of the blame keys once in 2^48 times."""
    answer[1, 1] += 1 << 29
    return answer


def other_block(**fields: Any) -> Callable[[Kept], Kept]:
    return lambda stored: (msgspec.structs.replace(stored[0], **fields), stored[1])


def changed(stored: Kept) -> Kept:
    block, body = stored
    return block, bytes([body[0] ^ 1]) + body[1:]


EVIDENCE: dict[str, Callable[[Kept], Kept]] = {
    "unsigned": other_block(signature=b"\0" * 70),
    "otherwise bound": other_block(direction=BACKWARD),
    "otherwise called": other_block(nonce=bytes(16)),
    "changed": changed,
    "short": lambda stored: (stored[0], stored[1][:-4]),
}
LIES = ("answer", "withheld", "swapped", "hangs up", *EVIDENCE)
"""What an executor does beside answering wrongly."""


class Trial:
    """An executor and two helpers, of which some lie."""

    def __init__(self, providers: Sequence[ScriptedProvider]) -> None:
        self.executor, *self.helpers = providers

    def begin(self, liars: set[int], lie: str) -> None:
        """Set the behaviour of all providers; number 0 is the executor."""
        for number, provider in enumerate((self.executor, *self.helpers)):
            provider.blocks.clear()
            provider.evidence = lambda stored: stored
            provider.behaviour = self._lies if number in liars else self._honest
        if 0 in liars:
            self.executor.evidence = lambda stored: self._evidence(lie, stored)

    def _honest(self, heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        return frame(reply, answer)

    def _lies(self, heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        return frame(reply, another(heard, reply, answer.clone()))

    def _evidence(self, lie: str, stored: Kept) -> Stored | None:
        if lie == "hangs up":
            return None
        if lie == "withheld":
            return wire.Failure(code=wire.ErrorCode.REFUSED, detail="no such block"), b""
        if lie == "swapped":
            return next((other for other in self.executor.blocks.values() if other is not stored), changed(stored))
        return stored if lie == "answer" else EVIDENCE[lie](stored)


def test_only_liars_are_named(executor: ScriptedProvider, new_provider: NewProvider, new_session: NewSession) -> None:
    """Every single liar and every pair of liars, with one helper and with two. No wrong product is returned."""
    trial = Trial([executor, new_provider(), new_provider()])
    names = [f"executor {executor.port}", *(f"helper {helper.port}" for helper in trial.helpers)]
    named = set[frozenset[int]]()

    @given(st.integers(1, 2), st.sets(st.integers(0, 2), max_size=2), st.sampled_from(LIES), st.integers(2, 5))
    @example(2, {0}, "answer", 3)
    @example(2, {1}, "answer", 3)
    @example(2, {2}, "answer", 3)
    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
    def holds(helpers: int, liars: set[int], lie: str, count: int) -> None:
        trial.begin(liars, lie)
        session = new_session("relay", helpers=trial.helpers[:helpers], pool_memory=0)
        present = {liar for liar in liars if liar <= helpers}
        found = set[str]()
        try:
            assert is_right(session, OUT, FORWARD, count)
        except VerificationError as error:
            found = set(error.provider.split(" and "))
        assert found <= {names[liar] for liar in present}
        assert {peer for peer in names if found and peer in found} == found
        assert bool(session.routes.quarantined) == bool(found)
        if len(present) == 1:
            assert found == {names[liar] for liar in present}
        named.add(frozenset(number for number, name in enumerate(names) if name in found))
        session.close()

    holds()
    assert {frozenset({0}), frozenset({1}), frozenset({2})} <= named


def one_row_more(block: wire.Block, body: bytes) -> tuple[wire.Block, bytes]:
    row = len(body) // block.rows
    return msgspec.structs.replace(block, rows=block.rows + 1), bytes([body[0] ^ 1]) + body[1:] + bytes(row)


def test_a_helper_that_signs_more_rows_than_it_was_told_to_does_not_frame_the_executor(scripted: Scripted) -> None:
    """The executor cannot know how many rows were ordered, so it accepts the block."""
    scripted.helper.deposits = one_row_more
    session = scripted.new_session("relay", pool_memory=0)
    with pytest.raises(VerificationError) as caught:
        is_right(session, OUT, FORWARD, 3)
    assert caught.value.provider == f"helper {scripted.helper.port}"


def test_two_helpers_do_not_frame_the_executor(new_provider: NewProvider, new_session: NewSession) -> None:
    """One helper tells the other one the ids of its blocks, and that one signs something else under them."""
    helpers = [new_provider(), new_provider()]
    helpers[0].signs_as = helpers[1]
    helpers[0].deposits = lambda *block: changed(block)
    session = new_session("relay", helpers=helpers, pool_memory=0)
    for seed in range(2):
        assert is_right(session, OUT, FORWARD, 3, seed)
    assert not session.routes.quarantined
    assert relayed(session) == (0, 6)  # relays have ended


@pytest.mark.parametrize("code", [wire.ErrorCode.REVOKED, wire.ErrorCode.BUSY, wire.ErrorCode.INTERNAL])
def test_an_executor_that_refuses_for_another_reason_than_a_missing_block_is_not_convicted(
    executor: ScriptedProvider, helper: ScriptedProvider, new_session: NewSession, code: Any
) -> None:
    """An executor may refuse, for example, because the tenant's certificate has just expired."""
    executor.evidence = lambda stored: (wire.Failure(code=code, detail="not now"), b"")
    helper.deposits = lambda *block: changed(block)
    session = new_session("relay", pool_memory=0)
    assert is_right(session, OUT, FORWARD, 3)
    assert not session.routes.quarantined


def test_evidence_that_is_lost_convicts_nobody(scripted: Scripted) -> None:
    """The helper lies in its first block, and an honest executor is restarted before it is asked for the block."""

    def lie_once(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        return frame(reply, another(heard, reply, answer) if len(scripted.helper.effects) == 1 else answer)

    scripted.helper.behaviour = lie_once
    scripted.executor.evidence = lambda stored: None
    session = scripted.new_session("relay", pool_memory=0)
    for seed in range(3):
        assert is_right(session, OUT, FORWARD, 3, seed)
    assert not session.routes.quarantined
    assert relayed(session) == (0, 9)  # relays have ended
