"""The fast lane: the same bits, pads and verdicts as the usual way, and every reason to leave it."""

import functools
import itertools
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.errors import NonFiniteError, RangeError, SymbiosisError, VerificationError
from symbiosis_priv.limits import GroupIndex, RingBits
from symbiosis_priv.network import wire
from tenant.core.parts import MOST_FEW, FloatRows, Places
from tenant.masking.backend import RingBackend
from tenant.masking.registry import session_scheme
from tenant.routing.known_provider import Tolerance
from tenant.session import session as sessions
from tenant.session.lane import Lane, Unfinished
from tenant.session.session import Session
from tests.tenant.conftest import NewProvider, NewSession, Scripted
from tests.tenant.scripted import Behaviour, Heard, ScriptedProvider, frame, honest, spoil

GROUPS = (0, 0, 0, 1)
HASTY = Tolerance(first_pause_s=0.01, last_pause_s=0.05)
LIMIT = wire.QuotaLimit(amount=5, unit="rows/s")


def failure(code: wire.ErrorCode) -> Behaviour:
    return lambda heard, reply, answer: (wire.Failure(code=code, detail="not now"), answer[:0])


def limited(heard: Heard, reply: wire.Result, answer: Tensor) -> tuple[wire.Message, Tensor]:
    return wire.Result.answering(heard.request, limit=LIMIT), answer


def another_request(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
    nonce = bytes(wire.NONCE_BYTES)
    return frame(reply, answer).replace(heard.request.nonce, nonce)


FAULTS: dict[str, Behaviour] = {
    "usual": honest,
    "lost": lambda heard, reply, answer: None,
    "busy": failure(wire.ErrorCode.BUSY),
    "refused": failure(wire.ErrorCode.REVOKED),
    "limited": limited,
    "a wrong answer": spoil,
    "an answer to another request": another_request,
}


@dataclass(frozen=True)
class Step:
    """One product; the fault meets its first request. Effects that are asked for meanwhile may come late."""

    group: int
    direction: Direction
    rows: int
    dtype: torch.dtype
    fault: str
    closes: bool
    late: bool = False


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(GROUPS),
        st.sampled_from([FORWARD, FORWARD, *DIRECTIONS]),
        st.sampled_from([1, 1, 1, 1, MOST_FEW, MOST_FEW + 1]),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        st.sampled_from(["usual"] * len(FAULTS) + list(FAULTS)),
        st.booleans(),
        st.booleans(),
    ),
    min_size=4,
    max_size=12,
)


ONE_ROW = Step(0, FORWARD, 1, torch.float32, "usual", closes=False)


@functools.lru_cache(1)
def narrowed(session: Session, ring_bits: RingBits) -> list[GroupFacts]:
    """The facts that a backend computes with. In a narrow ring, products wrap around all the time."""
    every = [facts.narrowed(ring_bits) for facts in session.preparation.facts]
    if ring_bits == 32:
        return every
    return [replace(f, bounds={way: replace(bound, spread=2.5) for way, bound in f.bounds.items()}) for f in every]


def multiply(session: Session, facts: GroupFacts, step: Step, seed: int) -> Tensor | type[Exception]:
    """The product of random rows, or the kind of the error. Every second product comes as a layer asks for it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(step.rows, facts.inputs(step.direction), generator=generator).to(step.dtype)
    y = torch.empty(step.rows, facts.outputs(step.direction), dtype=step.dtype)
    group = GroupIndex(step.group)
    try:
        if step.direction == FORWARD and seed % 2:
            outputs = session.forward_few(group, facts, x[None], step.dtype)
            if outputs is not None:
                return torch.cat(outputs, dim=-1)[0]
        session.multiply(group, step.direction, FloatRows(facts, step.direction, [x], [y]))
    except SymbiosisError as error:
        return type(error)
    return y


def late(*heard: Any) -> Any:
    time.sleep(0.005)  # longer than a product
    return honest(*heard)


def run(
    session: Session,
    executor: ScriptedProvider,
    steps: list[Step],
    ring_bits: RingBits,
    helper: ScriptedProvider | None = None,
) -> list[Tensor | type[Exception]]:
    found, facts = [], narrowed(session, ring_bits)
    for number, step in enumerate([ONE_ROW, ONE_ROW, *steps]):
        faults = iter([FAULTS[step.fault]])
        executor.behaviour = lambda *heard, faults=faults: next(faults, honest)(*heard)
        if helper is not None:
            helper.behaviour = late if step.late else honest
        if step.closes:
            executor.hang_up()
        found.append(multiply(session, facts[step.group], step, number))
    return found


def each_fault(test: Any) -> Any:
    """Let each fault meet the first product that the lane computes."""
    for fault in FAULTS:
        test = example(steps=[replace(ONE_ROW, fault=fault), ONE_ROW], masking="none", ring_bits=32)(test)
    return test


@each_fault
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, masking=st.sampled_from(["pad", "local", "none"]), ring_bits=st.sampled_from([32, 32, 24]))
def test_both_ways_give_the_same_bits_and_verdicts(
    steps: list[Step], masking: str, ring_bits: RingBits, new_provider: NewProvider, new_session: NewSession
) -> None:
    results, requests = [], []
    for lanes in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not lanes:
                patch.setattr(sessions, "may_repeat", lambda *_: False)
            executor, helper = new_provider(), new_provider()
            session = new_session(masking, [executor], [helper], tolerance=HASTY, deadline_s=2.0, ring_bits=ring_bits)
            results.append(run(session, executor, steps, ring_bits, helper))
            sent = [one.header for one in executor.executed]
            asked = [(one.request.group, one.request.direction, one.request.rows) for one in executor.executed]
            requests.append([(*one, sent.index(header)) for one, header in zip(asked, sent, strict=True)])
            same_nonce: dict[bytes, bytes] = {}
            for one in executor.executed:
                assert same_nonce.setdefault(one.request.nonce, one.payload) == one.payload  # rule 3
            assert session.routes.executors[0].in_flight == 0
            session.close()
    for with_lanes, without in zip(*results, strict=True):
        assert torch.equal(with_lanes, without) if isinstance(with_lanes, Tensor) else with_lanes is without
    assert requests[0] == requests[1]


def test_repeated_products_take_the_lane(
    executor: ScriptedProvider, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes, multiply_few = list[Unfinished | None](), Lane.multiply

    def observed(lane: Lane, places: Places) -> Unfinished | None:
        outcomes.append(multiply_few(lane, places))
        return outcomes[-1]

    monkeypatch.setattr(Lane, "multiply", observed)
    run(session, executor, [ONE_ROW] * 18, 32)  # the first products find the providers and make the lane
    assert outcomes.count(None) > 10
    ledger = session.ledger()
    assert ledger.rows == ledger.products == ledger.answers_verified == ledger.effects_verified == 20
    assert ledger.executor_round_trips == ledger.pads_taken == 20
    assert len({one.request.nonce for one in executor.executed}) == len(executor.executed)
    assert session.routes.executors[0].in_flight == 0


@pytest.mark.parametrize("ring_bits", [32, 24])
def test_a_layers_rows_take_the_lane(new_session: NewSession, scripted: Scripted, ring_bits: RingBits) -> None:
    """The backend's facts are a narrowed copy of the session's."""
    session = new_session("none", [scripted.executor], ring_bits=ring_bits)
    backend = RingBackend(session_scheme("none").facts(session.preparation, ring_bits), session)
    x = torch.randn(2, backend.facts[0].inputs(FORWARD))
    expected = [backend.linear(0, FORWARD, x) for _ in range(2)][-1]  # the first product finds the provider
    outputs = backend.forward_few(0, x[:, None], torch.float64)
    assert outputs is not None
    assert torch.equal(torch.cat(outputs, dim=-1)[:, 0], expected)


def test_rows_that_are_not_finite_are_refused_before_a_pad_is_burnt(
    executor: ScriptedProvider, session: Session
) -> None:
    run(session, executor, [], 32)
    facts, taken = session.preparation.facts[0], session.ledger().pads_taken
    x, y = torch.full((1, facts.inputs(FORWARD)), torch.inf), torch.empty(1, facts.outputs(FORWARD))
    with pytest.raises(NonFiniteError):
        session.multiply(GroupIndex(0), FORWARD, FloatRows(facts, FORWARD, [x], [y]))
    assert session.ledger().pads_taken == taken
    assert len(executor.executed) == 2


def test_a_lane_of_halved_rows_computes_no_forward_pass(scripted: Scripted) -> None:
    """Rows of another scale would have other bits."""
    session = scripted.new_session("none")
    facts = narrowed(session, 32)[0]
    x, y = torch.ones(1, facts.inputs(FORWARD)), torch.empty(1, facts.outputs(FORWARD))
    rows = FloatRows(facts, FORWARD, [x], [y]).selected([0], halved=True)
    for _ in range(2):  # the first product finds the provider
        session.multiply(GroupIndex(0), FORWARD, rows)
    assert session.runtime.lanes
    assert session.forward_few(GroupIndex(0), facts, x, x.dtype) is None


def test_rows_that_need_two_requests_make_no_lane(new_provider: NewProvider, new_session: NewSession) -> None:
    """Another executor, of other layers, accepts more rows than the one that is asked."""
    small, large = new_provider(layers="0", max_rows=2), new_provider(layers="1")
    session = new_session("none", [small, large])
    run(session, small, [replace(ONE_ROW, rows=4)] * 4, 32)
    assert len(small.executed) == 2 + 2 * 4
    assert set(session.runtime.lanes) == {(0, FORWARD, 1)}


def test_a_lane_reads_and_writes_matrices_of_the_right_shape_and_one_format(scripted: Scripted) -> None:
    """Its compiled code reads what the shapes say."""
    session = scripted.new_session("none")
    run(session, scripted.executor, [ONE_ROW], 32)
    facts, own = narrowed(session, 32)[0], session.runtime.lanes[GroupIndex(0), FORWARD, 1]
    x, width = torch.ones(1, facts.inputs(FORWARD)), facts.outputs(FORWARD)
    for shape in ((1, 63), (1, 65), (2, 64), (64,)):
        rows = FloatRows(facts, FORWARD, [torch.ones(shape)], [torch.empty(1, width)])
        rows.count = 1
        with pytest.raises(RangeError, match="float rows of shape"):
            session.multiply(GroupIndex(0), FORWARD, rows)
    single, double, half = torch.float32, torch.float64, torch.float16
    for more, dtypes in itertools.product((-1, 0, 1), ((single, single), (single, double), (half, half))):
        outputs = [torch.empty(1, w, dtype=dtype) for w, dtype in zip((width - 1, 1 + more), dtypes, strict=True)]
        fits = not more and dtypes == (single, single)
        assert bool(own.places(FloatRows(facts, FORWARD, [x], outputs))) == fits


@pytest.mark.parametrize("masking", ["none", "pad"])
def test_every_answer_of_a_long_run_is_checked(masking: str, scripted: Scripted) -> None:
    """The lie comes at the first, the second, ... the thirtieth single row of a session."""
    for honest_rows in range(30):
        liar, helpers = scripted.new_provider(), [scripted.new_provider()] if masking == "pad" else []
        session = scripted.new_session(masking, [liar], helpers)
        lie = replace(ONE_ROW, fault="a wrong answer")
        found = run(session, liar, [*[ONE_ROW] * honest_rows, lie], 32)
        assert found[-1] is VerificationError, honest_rows
        assert not any(isinstance(one, type) for one in found[:-1])
        assert liar.peer("executor") in session.routes.quarantined
        session.close()
        for provider in (liar, *helpers):
            provider.close()


def test_no_mask_is_used_twice_in_a_long_run_of_few_rows(scripted: Scripted, session: Session) -> None:
    zeros, facts = torch.zeros(MOST_FEW, 64), narrowed(session, 32)[0]
    for count in [1] * 40 + [2, 1, 3, 1, MOST_FEW] * 8 + [1] * 10:
        out = torch.empty(count, facts.outputs(FORWARD))
        session.multiply(GroupIndex(0), FORWARD, FloatRows(facts, FORWARD, [zeros[:count]], [out]))
    sent = [row.numpy().tobytes() for one in scripted.executor.executed for row in one.rows]
    assert len(sent) == 50 + 8 * (7 + MOST_FEW)
    assert len(set(sent)) == len(sent)
