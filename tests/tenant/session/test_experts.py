"""Rows for single experts of a stack: the same bits under every scheme, checked, attributed, and masked once."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction, quantise_rows
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import RangeError
from symbiosis_priv.limits import GroupIndex
from tenant.masking.backend import RingBackend, Simulation
from tenant.preparation.keys import prepare
from tenant.preparation.prepared import Preparation
from tenant.session.session import Session
from tests.experts import write
from tests.stacks import expert_counts, expert_product, stacks_of
from tests.tenant.conftest import NewProvider, NewSession, Scripted
from tests.tenant.scripted import Behaviour, ScriptedProvider, crowded, spoil, store_of

COUNTS: Counts = (3, 0, 1, 2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    path = write("Mixtral", tmp_path_factory.mktemp("mixtral"), intermediate_size=64, num_hidden_layers=1)
    return WeightStore(path)


@pytest.fixture(scope="module")
def preparation(store: WeightStore, tmp_path_factory: pytest.TempPathFactory) -> Preparation:
    return prepare(store, digest=store.manifest().digest, cache=tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="module")
def stacks(store: WeightStore) -> list[GroupIndex]:
    """One stack of each kind."""
    found = {entry.joined: index for index, entry in stacks_of(store).items()}
    return sorted(map(GroupIndex, found.values()))


def ring_rows(facts: GroupFacts, direction: Direction, count: int, *, seed: int = 0) -> Tensor:
    rows = torch.randn(count, facts.inputs(direction), generator=torch.Generator().manual_seed(seed))
    return quantise_rows(rows, facts.bounds[direction])[0]


def is_exact(session: Session, index: GroupIndex, direction: Direction, counts: Counts) -> bool:
    store, facts = store_of(session), session.preparation.facts[index].for_rows(counts)
    rows = ring_rows(facts, direction, sum(counts), seed=sum(counts))
    want = expert_product(store.group(index).weight, counts, rows, direction, store.manifest().groups[index].joined)
    return torch.equal(session.product(index, direction, rows, counts=counts), want)


@pytest.mark.parametrize(("masking", "helpers"), [("none", 0), ("local", 0), ("pad", 1), ("pad", 2)])
def test_products_by_expert_are_exact_with_every_scheme(
    scripted: Scripted, store: WeightStore, stacks: list[GroupIndex], masking: str, helpers: int
) -> None:
    session = scripted.new_session(
        masking, [scripted.new_provider()], [scripted.new_provider() for _ in range(helpers)]
    )

    @given(counts=expert_counts().filter(any))
    @settings(max_examples=8, suppress_health_check=list(HealthCheck))
    def exact(counts: Counts) -> None:
        assert all(is_exact(session, i, d, counts) for i, d in itertools.product(stacks, DIRECTIONS))

    exact()
    for index in stacks:  # the whole stack, in the same session
        rows = ring_rows(session.preparation.facts[index], FORWARD, 3)
        want = (rows.long() @ store.group(index).weight.long().t()).to(torch.int32)
        assert torch.equal(session.product(index, FORWARD, rows), want)
    ledger = session.ledger()
    assert ledger.answers_rejected == 0
    assert ledger.answers_verified == ledger.rows > 0


def test_rows_for_experts_in_a_narrow_ring_have_the_bits_of_the_simulation(
    new_provider: NewProvider, new_session: NewSession, stacks: list[GroupIndex]
) -> None:
    session = new_session("pad", [new_provider()], [new_provider()], ring_bits=24, row_bucket=4)
    facts = [crowded(group, spread=1.8) for group in session.preparation.facts]
    counts = (9, 0, 14, 7)
    for index, direction in itertools.product(stacks, DIRECTIONS):
        for its_counts in (counts, None):
            group = facts[index].for_rows(its_counts)
            rows = torch.randn(30, group.inputs(direction), generator=torch.Generator().manual_seed(index))
            got, want = torch.empty(2, 30, group.outputs(direction))
            for products, out in ((session, got), (Simulation(store_of(session)), want)):
                RingBackend(facts, products).multiply(index, direction, [rows], [out], counts=its_counts)
            assert torch.equal(got, want)
    ledger = session.ledger()
    assert ledger.rows_corrected > 0
    assert ledger.rows_repeated > 0
    assert ledger.answers_rejected == 0


def test_a_row_that_is_sent_again_does_not_show_its_expert(scripted: Scripted, stacks: list[GroupIndex]) -> None:
    """With `experts = "flat"` every expert gets the same number of rows. Rows of zeros never leave the ring."""
    session = scripted.new_session("pad", ring_bits=24)
    facts = [crowded(group, spread=1.8) for group in session.preparation.facts]
    counts, rows = (4, 4, 4, 4), torch.zeros(16, facts[stacks[0]].for_rows((4,) * 4).inputs(FORWARD))
    rows[5:7] = torch.randn(2, rows.shape[1], generator=torch.Generator().manual_seed(5))  # of the second expert
    got, want = torch.empty(2, 16, facts[stacks[0]].for_rows(counts).outputs(FORWARD))
    for _ in range(4):
        rows[5:7] = rows[5:7].roll(1, dims=1)
        for products, out in ((session, got), (Simulation(store_of(session)), want)):
            RingBackend(facts, products).multiply(stacks[0], FORWARD, [rows], [out], counts=counts)
        assert torch.equal(got, want)
    assert session.ledger().rows_repeated > 0
    for seen in (scripted.executor.executed, scripted.helper.effects):
        assert all(len(set(heard.request.counts or ())) == 1 for heard in seen)


def test_wrong_counts_and_counts_for_linears_send_nothing(scripted: Scripted, stacks: list[GroupIndex]) -> None:
    session = scripted.new_session("none")
    facts = session.preparation.facts
    backend = RingBackend(facts, session)
    x = torch.zeros(3, facts[stacks[0]].inputs(FORWARD))
    y = torch.zeros(3, facts[stacks[0]].for_rows(COUNTS).outputs(FORWARD))
    linear = next(index for index in range(len(facts)) if facts[index].by_expert is None)
    wrong = [(stacks[0], counts, "experts") for counts in ((1, 1, 0, 0), (1, 1, 1), (4, -1, 0, 0))]
    for index, counts, words in (*wrong, (linear, (3,), "not a stack")):
        with pytest.raises(RangeError, match=words):
            backend.multiply(index, FORWARD, [x], [y], counts=counts)
    assert not scripted.executor.heard


def test_a_product_in_several_requests_keeps_the_expert_of_every_row(
    new_provider: NewProvider, new_session: NewSession, stacks: list[GroupIndex]
) -> None:
    """By a limit on rows, in parts for several connections, and at a helper with a lower limit."""
    executor, helper = new_provider(max_rows=7), new_provider(max_rows=3)
    session = new_session("pad", [executor], [helper], part_bytes=1)
    assert is_exact(session, stacks[0], FORWARD, (5, 0, 1, 9))
    for heard, most in ((executor.executed, 7), (helper.effects, 3)):
        counts = [request.request.counts for request in heard]
        assert all(c is not None and sum(c) <= most for c in counts)
        assert [sum(column) for column in zip(*[c for c in counts if c], strict=True)] == [5, 0, 1, 9]


def test_dense_rows_and_rows_for_experts_never_share_a_mask(
    executor: ScriptedProvider, stacks: list[GroupIndex], session: Session
) -> None:
    """They differ in width, so a shared keystream would overlap. The rows are zeros, so masks are sent."""
    for index, direction in itertools.product(stacks, DIRECTIONS):
        facts = session.preparation.facts[index]
        for counts in (None, (2, 0, 0, 0), None, (0, 2, 0, 0)):
            width = facts.for_rows(counts).inputs(direction)
            session.product(index, direction, torch.zeros(2, width, dtype=torch.int32), counts=counts)
        words = torch.cat([heard.rows.flatten() for heard in executor.executed]).tolist()
        windows = {tuple(words[i : i + 4]) for i in range(0, len(words), 4)}
        assert len(windows) == len(words) // 4
        executor.heard.clear()


def quarantined(session: Session) -> set[int]:
    """The ports of the quarantined providers."""
    routes = session.routes
    return {r.peer.port for r in (*routes.executors, *routes.helpers) if r.peer in routes.quarantined}


LIES: dict[str, Behaviour] = {
    "a wrong entry": spoil,
    "the first expert's rows twice": lambda _, reply, answer: (reply, torch.cat([answer[:1], answer[:-1]])),
    "other counts": lambda _, reply, answer: (msgspec.structs.replace(reply, counts=COUNTS[::-1]), answer),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("role", ["executor", "helper"])
def test_a_lying_provider_is_named_and_another_one_takes_over(
    scripted: Scripted, preparation: Preparation, stacks: list[GroupIndex], lie: str, role: str
) -> None:
    providers = [scripted.new_provider() for _ in range(4)]
    liar = providers[0 if role == "executor" else 2]
    liar.behaviour = LIES[lie]
    prepared = replace(preparation, forget_keys=lambda: None)
    session = scripted.new_session("pad", providers[:2], providers[2:], prepared=prepared, pad_helpers=1)
    for index, direction in itertools.product(stacks, DIRECTIONS):
        for counts in (COUNTS, (0, 0, 0, 2)):
            assert is_exact(session, index, direction, counts)
    assert quarantined(session) == {liar.port}


def test_without_the_checkpoint_every_provider_of_the_product_is_quarantined(
    scripted: Scripted, store: WeightStore, tmp_path: Path, stacks: list[GroupIndex], preparation: Preparation
) -> None:
    """The V of stacks are not stored: they are computed from the checkpoint when a product was refused."""
    copy = Path(shutil.copytree(store.path, tmp_path / "model"))
    prepared = prepare(WeightStore(copy, cache=tmp_path), digest=preparation.manifest.digest, cache=tmp_path)
    (copy / "model.safetensors").unlink()
    providers: list[Any] = [scripted.new_provider() for _ in range(4)]
    providers[0].behaviour = spoil
    session = scripted.new_session("pad", providers[:2], providers[2:], prepared=prepared, pad_helpers=1)
    assert is_exact(session, stacks[0], FORWARD, COUNTS)
    assert len(quarantined(session)) == 2
