"""Products of rows for single experts: exact, batched over tenants, charged by their cost, and checked before they
run."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from provider.serve import Provider
from symbiosis_priv.arithmetic.ring import DIRECTIONS, Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.network import wire
from tests.experts import write
from tests.provider.clients import Client, execute
from tests.provider.conftest import Configure, Connect
from tests.provider.executor.test_executor import Watched, running
from tests.provider.products.test_products import ring_rows, work
from tests.stacks import expert_product, stacks_of

TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def store(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    path = write("Mixtral", tmp_path_factory.mktemp("mixtral"), intermediate_size=64, num_hidden_layers=1)
    return WeightStore(path, cache=cache)


@pytest.fixture(scope="module")
def provider(configure: Configure, store: WeightStore) -> Iterator[Provider]:
    with Provider(configure(checkpoint=store.path)) as provider:
        yield provider


def by_expert(request: wire.Execute, counts: Counts) -> wire.Execute:
    return msgspec.structs.replace(request, counts=counts, nonce=secrets.token_bytes(wire.NONCE_BYTES))


def oracle(store: WeightStore, group: int, direction: Direction, counts: Counts, rows: Tensor) -> Tensor:
    return expert_product(store.group(group).weight, counts, rows, direction, store.manifest().groups[group].joined)


def rows_for(entry: GroupEntry, direction: Direction, counts: Counts) -> Tensor:
    return ring_rows(sum(counts), entry.by_expert.columns(direction)[0])


@pytest.mark.parametrize(
    ("counts", "word"),
    [((1, 1, 0, 0), "add up"), ((1, 1, 1), "4 experts"), ((1, 1, 1, 0, 0), "4 experts"), ((), "4 experts")],
)
def test_wrong_counts_are_refused_and_the_connection_stays_open(
    connect: Connect, provider: Provider, store: WeightStore, counts: Counts, word: str
) -> None:
    client, (group, entry) = connect(to=provider), next(iter(stacks_of(store).items()))
    rows = ring_rows(3, entry.by_expert.inputs)
    refused(client, by_expert(execute(group, 3), counts), rows, word)
    client.product(by_expert(execute(group, 3), (0, 3, 0, 0)), rows)


def test_counts_for_linears_floats_and_rows_of_the_whole_stack_are_refused(
    connect: Connect, provider: Provider, store: WeightStore
) -> None:
    client, stacks, counts = connect(to=provider), stacks_of(store), (3, 0, 0, 0)
    linear = next(index for index in range(len(store.manifest().groups)) if index not in stacks)
    entry = store.manifest().groups[linear]
    refused(client, by_expert(execute(linear, 3), (3,)), ring_rows(3, entry.inputs), "not a stack")
    group, down = next((index, entry) for index, entry in stacks.items() if entry.joined == "inputs")
    refused(client, by_expert(execute(group, 3), counts), ring_rows(3, down.inputs), "payload")
    floats = by_expert(execute(group, 3, arithmetic="float"), counts)
    refused(client, floats, ring_rows(3, down.by_expert.inputs), "need ring arithmetic")


def refused(client: Client, request: wire.Execute, rows: Tensor, word: str) -> None:
    reply = client.ask(request, wire.RING32.pack(rows))
    assert isinstance(reply, wire.Failure)
    assert reply.code in (wire.ErrorCode.BAD_REQUEST, wire.ErrorCode.NOT_SERVED)
    assert word in reply.detail


def test_a_row_for_one_expert_is_charged_with_one_experts_work(
    connect: Connect, provider: Provider, store: WeightStore
) -> None:
    assert provider._gateway is not None
    usage = provider._gateway.state.usage

    def charged() -> int:
        return sum(counts.work for counts in usage.totals().values())

    client = connect("dave", to=provider)
    for group, entry in stacks_of(store).items():
        before = charged()
        rows = ring_rows(3, entry.by_expert.inputs)
        client.product(by_expert(execute(group, 3), (1, 0, 2, 0)), rows)
        assert charged() - before == 3 * entry.inputs * entry.stacked_outputs // entry.experts


class Noting(Watched):
    """Records the counts of every product."""

    def __init__(self, store: WeightStore) -> None:
        super().__init__(store)
        self.counts: list[Counts | None] = []

    def product(self, rows: Tensor, **what: object) -> Tensor:
        self.counts.append(what["counts"])  # type: ignore[arg-type]
        return super().product(rows, **what)


def test_rows_of_several_tenants_for_one_stack_share_products_by_expert(store: WeightStore) -> None:
    """Two tenants ask while a product is running. One product then serves both, sorted by expert. Dense rows of the
    same stack have another width and do not share it."""
    model = Noting(store)
    (group, entry), direction = next(iter(stacks_of(store).items())), DIRECTIONS[0]
    wanted = [(1, 0, 2, 0), (0, 3, 1, 1), (0, 0, 0, 2)]
    with running(model) as (inbox, _):
        pipes = [inbox.open_pipe() for _ in range(5)]

        def send(pipe: int, counts: Counts | None, rows: Tensor) -> None:
            request = by_expert(execute(group, len(rows)), counts) if counts else execute(group, len(rows))
            pipes[pipe].send(work(request, tenant=str(pipe)), wire.RING32.pack(rows))

        model.open.clear()
        send(0, None, ring_rows(1, entry.inputs))
        assert model.entered.wait(TIMEOUT_S)
        rows = [rows_for(entry, direction, counts) for counts in wanted]
        for number, counts in enumerate(wanted, start=1):
            send(number, counts, rows[number - 1])
        send(4, None, ring_rows(2, entry.inputs))
        model.open.set()
        answers = [pipe.receive(TIMEOUT_S) for pipe in pipes]
    for answer, counts, mine in zip(answers[1:4], wanted, rows, strict=True):
        assert answer is not None
        got = wire.RING32.unpack(answer.payload, rows=len(mine))
        assert torch.equal(got, oracle(store, group, direction, counts, mine))
    assert tuple(sum(c) for c in zip(*wanted, strict=True)) in model.counts
    assert model.counts.count(None) == 2


def test_every_row_keeps_its_expert_when_a_request_is_multiplied_in_pieces(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provider.scheduler.scheduler.MAX_BATCH_ROWS", 512)
    counts = (700, 0, 900, 1)
    model = Noting(store)
    group, entry = next(iter(stacks_of(store).items()))
    rows = rows_for(entry, "forward", counts)
    with running(model) as (inbox, _):
        pipe = inbox.open_pipe()
        pipe.send(work(by_expert(execute(group, len(rows)), counts)), wire.RING32.pack(rows))
        answer = pipe.receive(TIMEOUT_S)
    assert answer is not None
    assert len(model.counts) > 1
    got = wire.RING32.unpack(answer.payload, rows=len(rows))
    assert torch.equal(got, oracle(store, group, "forward", counts, rows))
