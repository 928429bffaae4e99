"""Sessions with `ring_bits = 24`: the same bits as the simulation, a quarter fewer bytes, and only liars are named."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.arithmetic.wraps import Corrector
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ProviderError, RangeError, VerificationError
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.core.masked import UNMASKED_BY_CHOICE
from tenant.core.parts import Part, Plan
from tenant.core.verifier import VerificationKeys
from tenant.masking.backend import RingBackend, RingRows, Simulation
from tenant.preparation.prepared import Preparation
from tenant.session import refused
from tenant.session.failover import Attempts
from tenant.session.session import Session
from tests.tenant.conftest import NewProvider, NewSession, Scripted
from tests.tenant.scripted import Heard, ScriptedProvider, crowded, frame, honest, product_of, ring_rows, store_of

QKV, OUT, MLP, DOWN = map(GroupIndex, range(4))


def reference(session: Session, spread: float = 2.5) -> RingBackend:
    facts = [crowded(group, spread=spread) for group in session.preparation.facts]
    return RingBackend(facts, Simulation(store_of(session)))


def backend_of(session: Session, spread: float = 2.5) -> RingBackend:
    return RingBackend([crowded(group, spread=spread) for group in session.preparation.facts], session)


def has_the_bits_of_the_simulation(
    session: Session, index: int, direction: Direction, rows: Tensor, spread: float
) -> bool:
    got = backend_of(session, spread).linear(index, direction, rows)
    return torch.equal(got, reference(session, spread).linear(index, direction, rows))


def floats(session: Session, index: int, direction: Direction, count: int, seed: int = 0) -> Tensor:
    width = session.preparation.facts[index].inputs(direction)
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("masking", "helpers"), [("none", 0), ("local", 0), ("pad", 2)])
def test_every_scheme_has_the_bits_of_the_simulation(
    new_provider: NewProvider, new_session: NewSession, masking: str, helpers: int
) -> None:
    """Rows that wrap once or twice are corrected, and rows that wrap more often are multiplied again."""
    session = new_session(masking, [new_provider()], [new_provider() for _ in range(helpers)], ring_bits=24)

    @given(st.data(), st.sampled_from(range(9)), testing.directions(), st.integers(1, 40), st.sampled_from([1.5, 2.5]))
    @settings(max_examples=12, suppress_health_check=list(HealthCheck))
    def exact(data: st.DataObject, index: int, direction: Direction, count: int, spread: float) -> None:
        rows = data.draw(testing.float_rows(width=session.preparation.facts[index].inputs(direction), count=count))
        assert has_the_bits_of_the_simulation(session, index, direction, rows, spread)

    exact()
    for direction in DIRECTIONS:
        assert has_the_bits_of_the_simulation(session, DOWN, direction, floats(session, DOWN, direction, 200), 1.5)
    ledger = session.ledger()
    assert ledger.rows_corrected > 0
    assert ledger.rows_repeated > 0
    assert ledger.answers_rejected == 0


def test_what_providers_see_of_a_row_that_is_sent_again(executor: ScriptedProvider, new_session: NewSession) -> None:
    """Providers see the number of rows, and other masked words under a new pad."""
    session = new_session("pad", ring_bits=24)
    rows = floats(session, DOWN, FORWARD, 60)
    for _ in range(2):
        assert has_the_bits_of_the_simulation(session, DOWN, FORWARD, rows, 1.5)
    counts = [h.request.rows for h in executor.executed]
    assert counts[: len(counts) // 2] == counts[len(counts) // 2 :]
    assert counts[0] == 60 > counts[1] > 0
    assert sum(counts) == 120 + session.ledger().rows_repeated
    words = torch.cat([h.rows for h in executor.executed])
    assert len(words.unique(dim=0)) == len(words) == sum(counts)


def test_an_output_that_wraps_in_every_row_is_not_taken_for_a_lie(
    new_session: NewSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in SmolLM2-135M, where one output of a layer group wraps in most rows."""
    monkeypatch.setattr(Attempts, "refused", lambda *_, **__: pytest.fail("a fault was suspected"))
    monkeypatch.setattr(refused, "_ENTRIES", 500)  # rows are corrected in several steps
    session = new_session("pad", ring_bits=24)
    rows = 0.5 * floats(session, OUT, FORWARD, 60) + store_of(session).group(OUT).weight[5].to(torch.float32) / 100
    assert has_the_bits_of_the_simulation(session, OUT, FORWARD, rows, 5.0)
    assert session.ledger().rows_corrected > 30
    assert session.ledger().rows_repeated == 0


def test_three_bytes_per_integer_travel(scripted: Scripted) -> None:
    session = scripted.new_session("pad", ring_bits=24)
    facts = session.preparation.facts[QKV].narrowed(24)
    rows = floats(session, QKV, FORWARD, 5)
    backend = RingBackend([facts], session)
    assert torch.equal(
        backend.linear(QKV, FORWARD, rows),
        RingBackend([facts], Simulation(store_of(session))).linear(QKV, FORWARD, rows),
    )
    heard = scripted.executor.executed[0]
    assert len(heard.payload) == 3 * 5 * facts.inputs(FORWARD)
    assert {h.request.ring_bits for h in scripted.executor.heard + scripted.helper.heard} == {24}
    assert {hello.version for hello in scripted.executor.hellos} == {wire.NARROW_VERSION}
    assert {hello.version for hello in scripted.helper.hellos} == {wire.HYBRID_VERSION}
    ledger, size = session.ledger(), wire.RING24.size(5, facts.outputs(FORWARD))
    assert size < ledger.bytes_from_executors < size + 400


def test_a_helper_without_ml_kem_is_refused_by_name(scripted: Scripted) -> None:
    """A helper of an older release, which knows versions up to 5."""
    refusal = wire.Failure(code=wire.ErrorCode.BAD_REQUEST, detail="this provider speaks versions 3 and 4 and 5, not 6")
    scripted.helper.refusal = lambda hello: refusal if hello.version > 5 else None
    session = scripted.new_session("pad")
    with pytest.raises(ProviderError, match=r"ML-KEM-768 only: ask its operator to upgrade"):
        session.product(QKV, FORWARD, torch.ones(1, 64, dtype=torch.int32))
    assert not scripted.helper.effects
    assert not scripted.executor.executed


def test_integers_beyond_the_ring_are_refused(new_session: NewSession) -> None:
    session = new_session("none", ring_bits=24)
    assert session.product(QKV, FORWARD, torch.ones(1, 64, dtype=torch.int32)).shape[0] == 1
    with pytest.raises(RangeError, match="24 bits"):
        session.product(QKV, FORWARD, torch.full((1, 64), 1 << 20, dtype=torch.int32))
    assert not session.routes.quarantined


def test_only_liars_are_named(new_provider: NewProvider, new_session: NewSession) -> None:
    """An executor and two helpers in a ring that wraps all the time; errors of any valuation up to 2^20."""
    parties = {"executor": new_provider(), "first": new_provider(), "second": new_provider()}

    @given(
        st.sets(st.sampled_from(sorted(parties)), max_size=2),
        st.lists(st.integers(1, 2**24 - 1).filter(lambda error: error % (1 << 21)), min_size=3, max_size=3),
        st.integers(1, 12),
        st.integers(0, 99),
    )
    @settings(max_examples=20, suppress_health_check=list(HealthCheck), deadline=None)
    def named(liars: set[str], errors: list[int], count: int, seed: int) -> None:
        for error, (name, party) in zip(errors, parties.items(), strict=True):

            def lie(heard: Heard, reply: wire.Result, answer: Tensor, error: int = error) -> bytes:
                answer[seed % len(answer), seed % answer.shape[1]] += error
                return frame(reply, answer)

            party.behaviour = lie if name in liars else honest
        session = new_session(
            "pad", [parties["executor"]], [parties["first"], parties["second"]], pool_memory=0, ring_bits=24
        )
        rows = floats(session, OUT, FORWARD, count, seed)
        want = reference(session).linear(OUT, FORWARD, rows)
        ports = {f"{'executor' if name == 'executor' else 'helper'} {parties[name].port}" for name in liars}
        found = set[str]()
        try:
            got = backend_of(session).linear(OUT, FORWARD, rows)
        except VerificationError as error:
            found = set(error.provider.split(" and "))
        assert bool(session.routes.quarantined) == bool(found)
        if not found:
            assert torch.equal(got, want)
        cancel = len(liars) == 2 and not found  # the errors of two liars may cancel
        assert found == (set() if cancel else ports)
        session.close()

    named()


def test_an_error_that_the_blame_keys_miss_is_not_used(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the blame keys accept everything. A refused row is multiplied again until no product can wrap."""
    asked = []

    def lie(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        asked.append(len(answer))
        answer[0, 0] += 1 << 23
        return frame(reply, answer)

    monkeypatch.setattr("tenant.core.blame.BlameKeys.accepts", lambda *_, **__: True)
    scripted.executor.behaviour = lie
    session = scripted.new_session("pad", ring_bits=24)
    with pytest.raises(VerificationError, match=" or "):
        backend_of(session).linear(OUT, FORWARD, floats(session, OUT, FORWARD, 3))
    assert asked == [3, 1, 1]  # the ring holds 2.5, 5 and 10 standard deviations; no product of 64 inputs leaves 8


def test_nothing_is_corrected_that_the_second_column_does_not_confirm(
    scripted: Scripted, preparation: Preparation
) -> None:
    """The second keys are those of other weights: every row that wrapped is sent again."""
    other = VerificationKeys.fresh()
    for index, facts in enumerate(preparation.facts):
        other.add(GroupIndex(index), torch.ones((facts.outputs(FORWARD), facts.inputs(FORWARD)), dtype=torch.int16))
    session = scripted.new_session("none", prepared=replace(preparation, second=lambda: other), ring_bits=24)
    backend_of(session).linear(DOWN, FORWARD, floats(session, DOWN, FORWARD, 20))
    ledger = session.ledger()
    assert ledger.rows_corrected == ledger.answers_rejected == 0
    assert ledger.rows_repeated > 0


def test_a_wrong_correction_is_not_used(preparation: Preparation, store: WeightStore) -> None:
    """A corrected product is checked as an answer is."""
    integers = ring_rows(preparation, DOWN, FORWARD, 3) >> 8
    right = product_of(store, DOWN, FORWARD, integers)
    wrong = right.clone()
    wrong[1, 0] += 1 << 24
    rows, (r, v) = RingRows(integers, outputs=right.shape[1], ring_bits=24), preparation.keys[DOWN, FORWARD]
    encoded, expected = torch.empty_like(integers), torch.empty(3, dtype=torch.int64)
    rows.encode(encoded, v=v, expected=expected)
    plan = Plan(DOWN, FORWARD, integers.shape[1], right.shape[1], r, v, lambda: (r, v))
    part = Part(plan, rows, 0, encoded, expected, UNMASKED_BY_CHOICE)
    rows.product.zero_()
    assert part.put([0, 1, 2], rows.selected([0, 1, 2]), wrong) == [1]
    assert torch.equal(rows.product[::2], right[::2])
    assert not rows.product[1].any()


def test_a_liar_does_not_cost_the_search_for_wraps_of_two_entries(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search takes tens of milliseconds a row."""
    searched, pairs = [], Corrector._pairs

    def noted(corrector: Corrector, difference: int) -> Any:
        searched.append(difference)
        return pairs(corrector, difference)

    monkeypatch.setattr(Corrector, "_pairs", noted)

    def lie(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        answer[:20, 0] += 1
        return frame(reply, answer)

    scripted.executor.behaviour = lie
    session = scripted.new_session("pad", ring_bits=24)
    with pytest.raises(VerificationError, match="executor"):
        backend_of(session, spread=7.0).linear(OUT, FORWARD, floats(session, OUT, FORWARD, 200))
    assert not searched
