"""Which requests share a product, what stays in memory, and copies to a device and back. The conformance suite
(`tests/threat_model/test_verify.py`) compares every product of an honest provider with an oracle."""

import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.strategies import DataObject
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from provider.config.memory_plan import widest
from provider.config.schema import MIB, ExecutorConfig
from provider.executor.executor import Executor
from provider.executor.queues import ExecutorAnswer, LocalInbox, ProductRequest
from provider.executor.supervisor import make
from provider.products.model import LocalOperands, ServedModel, Transfers, open_store
from provider.serve import Provider
from symbiosis_priv.arithmetic.keystream import Seed, expand, mask_key
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError, ProviderError
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.kernels import RingMatrix
from symbiosis_priv.limits import RingBits
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity
from tests import drawn
from tests.provider.clients import effect, execute
from tests.provider.conftest import Configure, Connect
from tests.stacks import expert_counts
from tests.waiting import until

FLOATS = ExecutorConfig(threads=1, float_memory_mib=2048)


def ring_rows(rows: int, width: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(1 << 31), 1 << 31, (rows, width), generator=generator, dtype=torch.int64)
    return x.to(torch.int32)


def oracle(store: WeightStore, group: int, direction: Direction, rows: Tensor) -> Tensor:
    """The int64 product wraps mod 2^64, so its low 32 bits are the ring's."""
    weight = store.group(group).weight.to(torch.int64)
    return (rows.to(torch.int64) @ (weight.t() if direction == "forward" else weight)).to(torch.int32)


@pytest.mark.parametrize("max_batch_rows", [16_384, 3])
def test_concurrent_tenants_get_the_same_bits_as_alone(
    configure: Configure, connect: Connect, store: WeightStore, monkeypatch: pytest.MonkeyPatch, max_batch_rows: int
) -> None:
    """Products have the same bits also if every request is cut into pieces of three rows."""
    monkeypatch.setattr("provider.scheduler.scheduler.MAX_BATCH_ROWS", max_batch_rows)
    seed = Seed(secrets.token_bytes(32))
    entry = store.manifest().groups[0]
    masks = expand(mask_key(seed, group_name=entry.name, direction="forward"), first_row=0, rows=9, width=entry.inputs)
    expected = oracle(store, 0, "forward", masks)

    def executor(number: int) -> None:
        client = connect(("alice", "bob")[number % 2], to=provider)
        for direction in DIRECTIONS:
            x = ring_rows(number + 1, entry.columns(direction)[0], seed=number)
            for _ in range(10):
                got = client.product(execute(0, len(x), direction=direction), x)
                assert torch.equal(got, oracle(store, 0, direction, x))

    def helper() -> None:
        client = connect(role="helper", to=provider)
        for _ in range(20):
            assert torch.equal(client.product(effect(0, 9, seed=seed)), expected)

    with Provider(configure()) as provider, ThreadPoolExecutor(8) as pool:
        runs = [*(pool.submit(executor, number) for number in range(6)), *(pool.submit(helper) for _ in range(2))]
        for run in runs:
            run.result()
        report = provider.status().executor
    assert report is not None
    assert report.batch_rows.total == sum(10 * 2 * (n + 1) for n in range(6)) + 2 * 20 * 9


def work(request: wire.Execute | wire.Effect, *, tenant: str = "alice") -> ProductRequest:
    now = time.monotonic()
    identity = TenantIdentity(tenant, authority="sha256:1")
    return ProductRequest(
        tenant=identity, stage="fine_tuning", weight=1.0, arrival=now, deadline=now + 60, request=request
    )


class CountingModel(ServedModel):
    """Records the rows and the ring of each product."""

    def __init__(self, store: WeightStore) -> None:
        super().__init__(store)
        self.calls: list[tuple[int, int]] = []
        self.rings: list[int] = []

    def product(self, rows: Tensor, **what: Any) -> Tensor:
        self.calls.append((what["index"], len(rows)))
        self.rings.append(what["ring_bits"])
        return super().product(rows, **what)


def answers_of(
    model: ServedModel,
    asked: Sequence[tuple[wire.Execute | wire.Effect, Tensor]],
    *,
    watching: contextlib.AbstractContextManager[object] | None = None,
    narrow: bool = False,
) -> list[ExecutorAnswer]:
    """The answers to requests of one tenant each, which have all arrived before the executor starts. `narrow`: those of
    24 bits are as on the wire."""
    inbox = LocalInbox()
    with patch("provider.scheduler.scheduler.SLICE_S", 10.0):
        executor = Executor(model, inbox=inbox)
    pipes = [inbox.open_pipe() for _ in asked]
    for tenant, (pipe, (request, rows)) in enumerate(zip(pipes, asked, strict=True)):
        packed = narrow and request.ring_bits == 24
        encoding = wire.RING24 if packed else wire.RING32
        payload = encoding.pack(rows) if isinstance(request, wire.Execute) else memoryview(b"")
        pipe.send(msgspec.structs.replace(work(request, tenant=str(tenant)), narrow=packed), payload)
    executor.stop()
    with watching or contextlib.nullcontext():
        executor.run()
    answers = [pipe.receive(0.0) for pipe in pipes]
    assert all(answer is not None and not answer.failure for answer in answers)
    return [answer for answer in answers if answer is not None]


def rows_in(answer: ExecutorAnswer, count: int) -> Tensor:
    return wire.RING32.unpack(bytearray(answer.payload), rows=count)


@pytest.mark.parametrize("max_batch_rows", [100, 5, 1])
def test_waiting_requests_share_a_product(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, max_batch_rows: int
) -> None:
    """Requests for one group share products, also when they are cut; other groups have separate products."""
    monkeypatch.setattr("provider.scheduler.scheduler.MAX_BATCH_ROWS", max_batch_rows)
    model = CountingModel(store)
    width = store.manifest().groups[0].inputs
    other = store.manifest().groups[1].inputs
    seed = Seed(secrets.token_bytes(32))
    key = mask_key(seed, group_name=store.manifest().groups[0].name, direction="forward")
    asked: list[tuple[wire.Execute | wire.Effect, Tensor]] = [
        (execute(0, 1), ring_rows(1, width)),
        (execute(1, 2), ring_rows(2, other)),
        (execute(0, 2), ring_rows(2, width, seed=1)),
        (effect(0, 5, seed=seed), expand(key, first_row=0, rows=5, width=width)),
        (execute(0, 4), ring_rows(4, width, seed=2)),
    ]
    answers = answers_of(model, asked)
    products = [rows for group, rows in model.calls if group == 0]
    assert sum(products) == 12
    assert max(products) <= max_batch_rows
    assert sum(rows for group, rows in model.calls if group == 1) == 2
    if max_batch_rows == 100:
        assert len(products) <= 2  # the keystream may be ready a little later
    for answer, (request, rows) in zip(answers, asked, strict=True):
        assert torch.equal(rows_in(answer, len(rows)), oracle(store, request.group, "forward", rows))
        assert answer.rows == request.rows


@pytest.mark.parametrize(("rings", "ring"), [((24, 24), 24), ((24, 32), 32), ((32, 32), 32)])
def test_a_product_is_as_wide_as_its_widest_request(
    store: WeightStore, rings: Sequence[wire.RingBits], ring: int
) -> None:
    model = CountingModel(store)
    rows = ring_rows(2, store.manifest().groups[0].inputs)
    asked = [(msgspec.structs.replace(execute(0, 2), ring_bits=bits), rows) for bits in rings]
    want = oracle(store, 0, "forward", rows)
    for bits, answer in zip(rings, answers_of(model, asked), strict=True):
        assert torch.equal(rows_in(answer, 2) << 32 - bits, want << 32 - bits)
    assert model.rings == [ring]


def test_a_failing_product_is_answered_and_forgotten(
    connect: Connect, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    x = ring_rows(1, store.manifest().groups[0].inputs)

    def fail(*_: object, **__: object) -> Tensor:
        raise RuntimeError("secret content")

    with monkeypatch.context() as patch:
        patch.setattr(ServedModel, "product", fail)
        reply = client.ask(execute(0, 1), wire.RING32.pack(x))
    assert isinstance(reply, wire.Failure)
    assert reply.code == wire.ErrorCode.INTERNAL
    assert "secret" not in reply.detail
    assert torch.equal(client.product(execute(0, 1), x), oracle(store, 0, "forward", x))


def test_no_tensor_is_kept_between_requests(
    configure: Configure, connect: Connect, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of rows and results is free when all requests are answered: requests alone, batched, cut, refused, and
    effects.

    The test watches storages, not tensors, because a slice of a product is another tensor over the same storage.
    """
    kept: list[StorageWeakRef] = []
    product = ServedModel.product

    def watched(self: ServedModel, rows: Tensor, **what: Any) -> Tensor:
        result = product(self, rows, **what)
        kept.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (rows, result))
        return result

    monkeypatch.setattr(ServedModel, "product", watched)
    config = configure(executor=FLOATS)
    monkeypatch.setattr("provider.scheduler.scheduler.MAX_BATCH_ROWS", 5)
    monkeypatch.setattr("provider.scheduler.scheduler.SLICE_S", 1.0)
    with Provider(config) as provider:
        width = store.manifest().groups[0].inputs

        def ask(tenant: str) -> None:
            client = connect(tenant, to=provider)
            for rows in (0, 1, 4, 5, 17):
                client.product(execute(0, rows), ring_rows(rows, width))
                client.product(execute(0, rows, arithmetic="float"), torch.ones(rows, width))
            assert isinstance(client.ask(execute(0, 1), b"too little"), wire.Failure)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(ask, ("alice", "bob", "carol")))
        helper = connect("dave", role="helper", to=provider)
        helper.send(effect(0, 23, seed=secrets.token_bytes(32)))
        assert isinstance(helper.receive()[0], wire.Result)
        until(lambda: all(storage.expired() for storage in kept))
        assert len(kept) > 60


def test_a_small_answer_does_not_keep_a_large_product(store: WeightStore) -> None:
    """A tenant that reads one row slowly keeps no memory of the other tenants in its product."""
    width = store.manifest().groups[0].inputs
    products: list[StorageWeakRef] = []

    class Watched(ServedModel):
        def product(self, rows: Tensor, **what: Any) -> Tensor:
            result = super().product(rows, **what)
            products.append(StorageWeakRef(result.untyped_storage()))
            return result

    small, large = answers_of(Watched(store), [(execute(0, rows), ring_rows(rows, width)) for rows in (1, 8192)])
    assert len(products) == 1
    expected = oracle(store, 0, "forward", ring_rows(1, width))
    del large
    assert products[0].expired()
    assert torch.equal(rows_in(small, 1), expected)


def test_a_helpers_rows_are_multiplied_where_they_were_expanded(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, this memory is page-locked."""
    model, multiplied = ServedModel(store), list[int]()
    memory, product, taken = model.operands.memory, model.operands.product, list[NDArray[np.int32]]()

    def counted(entries: int) -> NDArray[np.int32]:
        taken.append(memory(entries))
        return taken[-1]

    def noted(rows: Tensor, **what: Any) -> Tensor:
        multiplied.append(rows.data_ptr())
        return product(rows, **what)

    monkeypatch.setattr(model.operands, "memory", counted)
    monkeypatch.setattr(model.operands, "product", noted)
    answers_of(model, [(effect(0, 5, seed=Seed(bytes(32))), torch.empty(0, dtype=torch.int32))])
    assert multiplied == [array.ctypes.data for array in taken] != []


@given(data=st.data(), direction=testing.directions(), chunk=st.integers(1, 9), counts=st.none() | expert_counts(3))
def test_a_product_in_chunks_equals_the_whole_product(
    data: DataObject, direction: Direction, chunk: int, counts: Counts | None
) -> None:
    """Of rows for a whole matrix, or for single experts, whose matrices may be stored transposed."""
    matrix = RingMatrix(data.draw(drawn.integer_weights(outputs=12, inputs=24, bits=8)), weight_bits=8, height=4)
    if counts is not None:
        matrix = matrix.as_stack(3, transposed=data.draw(st.booleans()))
    width, _ = matrix.columns(direction, by_expert=counts is not None)
    count = st.integers(0, 20) if counts is None else st.just(sum(counts))
    rows = data.draw(testing.ring_rows(width=width, count=count))
    before = rows.clone()
    transfers = Transfers(torch.device("cpu"), widest=24, chunk=chunk)
    other = transfers.product(matrix, rows.flip(0), direction, counts=counts)  # uses the same memory
    kept = other.clone()
    got = transfers.product(matrix, rows, direction, counts=counts)
    assert torch.equal(other, kept)
    assert torch.equal(got, matrix.product(rows, direction, counts=counts))
    assert torch.equal(rows, before)


def test_a_gpus_programs_are_compiled_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not depend on the shape, so one layer group compiles them all."""
    loaded: list[int] = []
    groups = [SimpleNamespace(columns=lambda _: (3, 5))] * 4
    manifest = SimpleNamespace(groups=groups)
    store: Any = SimpleNamespace(device="cuda:1", served=range(1, 3), manifest=lambda: manifest, matrix=loaded.append)
    monkeypatch.setattr("provider.products.model.Transfers", lambda device, widest: (device, widest))
    assert set(LocalOperands(store).loaded) == {1}
    assert loaded == [1]


@pytest.mark.parametrize("rows", [1, 9])
def test_every_thread_that_multiplies_uses_the_device(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the current device belongs to a thread, and every thread begins with the first one."""
    matrix = RingMatrix(torch.ones((3, 5), dtype=torch.int16), weight_bits=10)
    transfers, used = Transfers(torch.device("cpu"), widest=5, chunk=4), list[tuple[int, object]]()
    monkeypatch.setattr(transfers._module, "set_device", lambda device: used.append((threading.get_ident(), device)))
    for _ in range(2):
        thread = threading.Thread(
            target=transfers.product, args=(matrix, torch.ones(rows, 5, dtype=torch.int32), FORWARD)
        )
        thread.start()
        thread.join()
        assert used.pop() == (thread.ident, CPU)


def test_each_rank_has_the_device_with_its_number(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    for device, alone, ranks in (("cuda", "cuda:0", "cuda:3"), ("cuda:1", "cuda:1", "cuda:1"), ("cpu", "cpu", "cpu")):
        config = configure(executor=ExecutorConfig(device=device))
        assert open_store(config).device == alone
        with monkeypatch.context() as patch:
            patch.setattr("torch.distributed.is_initialized", lambda: True)
            assert open_store(config).device == ranks


@given(
    direction=testing.directions(),
    count=st.integers(1, 16),
    ring_bits=st.sampled_from([24, 32]),
    seed=st.integers(0, 9),
)
def test_few_rows_on_a_device_have_the_bits_of_the_compiled_product(
    store: WeightStore, direction: Direction, count: int, ring_bits: RingBits, seed: int
) -> None:
    operands = LocalOperands(store)
    model = ServedModel(store, operands=operands)
    operands._transfers = Transfers(CPU, widest=widest(store.manifest().groups))
    width, columns = store.manifest().groups[1].columns(direction)
    encoding = wire.encoding_of("ring", ring_bits)
    sent = np.frombuffer(encoding.pack(ring_rows(count, width, seed=seed)), dtype=np.uint8)
    request = msgspec.structs.replace(execute(1, count, direction=direction), ring_bits=ring_bits)
    space = np.zeros(encoding.size(count, columns), dtype=np.uint8)
    for _ in range(3):
        product = model.few(request)
        assert product is not None
        product(sent.ctypes.data, space.ctypes.data)
        expected = oracle(store, 1, direction, ring_rows(count, width, seed=seed))
        assert space.data == encoding.pack(expected)
        space[:] = 0
    assert operands.any_thread
    assert len(operands._few) == 1
    assert model.few(execute(1, 17, direction=direction)) is None


def on_a_device(store: WeightStore, *, chunk: int) -> tuple[LocalOperands, list[tuple[torch.dtype, int]]]:
    """Operands that multiply as on a GPU, on the CPU; and the dtype and the parts of each product's rows."""
    operands, seen = LocalOperands(store), list[tuple[torch.dtype, int]]()
    transfers = operands._transfers = Transfers(CPU, widest=widest(store.manifest().groups), chunk=chunk)
    operands.joins, product = True, transfers.product

    def noted(matrix: RingMatrix, rows: Tensor, *direction: Direction, **what: Any) -> Tensor:
        seen.append((rows.dtype, 1 + len(what["more"])))
        return product(matrix, rows, *direction, **what)

    transfers.product = noted  # type: ignore[method-assign]
    return operands, seen


@pytest.mark.parametrize("max_batch_rows", [100, 5])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_requests_are_joined_in_the_memory_of_the_device(
    store: WeightStore, direction: Direction, max_batch_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those as on the wire in 24 bits are unpacked there, and share no product with others."""
    monkeypatch.setattr("provider.scheduler.scheduler.MAX_BATCH_ROWS", max_batch_rows)
    operands, seen = on_a_device(store, chunk=4)
    width = store.manifest().groups[1].columns(direction)[0]
    asked = [
        (msgspec.structs.replace(execute(1, rows, direction=direction), ring_bits=bits), ring_rows(rows, width))
        for rows, bits in ((1, 24), (3, 32), (6, 24), (2, 24), (9, 32))
    ]
    answers = answers_of(ServedModel(store, operands=operands), asked, narrow=True)
    for answer, (request, rows) in zip(answers, asked, strict=True):
        assert answer.payload == request.encoding.pack(oracle(store, 1, direction, rows))
    if max_batch_rows == 100:
        assert sorted(seen, key=str) == [(torch.int32, 2), (torch.uint8, 3)]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows_of_24_bits_stay_as_they_are_on_the_wire(
    direction: Direction, configure: Configure, connect: Connect, store: WeightStore
) -> None:
    operands, seen = on_a_device(store, chunk=8)
    width = store.manifest().groups[1].columns(direction)[0]
    with Provider(configure()) as provider:
        provider.executor._executor._model.operands = operands  # type: ignore[attr-defined]
        client = connect("bob", to=provider)
        for narrow in (True, False):
            provider.executor.narrow = narrow
            rows = ring_rows(20, width)
            got = client.product(msgspec.structs.replace(execute(1, 20, direction=direction), ring_bits=24), rows)
            assert torch.equal(got << 8, oracle(store, 1, direction, rows) << 8)
    assert seen == [(torch.uint8, 1), (torch.int32, 1)]


@pytest.mark.parametrize(
    ("settings", "narrow"), [({}, False), ({"device": "cuda:1"}, True), ({"device": "cuda", "ranks": 2}, False)]
)
def test_only_a_process_with_one_gpu_takes_rows_of_24_bits(
    settings: dict[str, Any], narrow: bool, configure: Configure
) -> None:
    handle = make(configure(executor=ExecutorConfig(**settings)), model_digest="sha256:1")
    assert handle.narrow is narrow
    handle.stop(1.0)
    handle.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_wait_for_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-511, 512, (4096, 2048), dtype=torch.int16, generator=generator)
    here, there = RingMatrix(weight, weight_bits=10), RingMatrix(weight, weight_bits=10, device="cuda")
    transfers = Transfers(torch.device("cuda:0"), widest=4096, chunk=64)
    for _ in range(20):
        rows = torch.randint(-(2**31), 2**31, (1000, 2048), dtype=torch.int32, generator=generator)
        assert torch.equal(transfers.product(there, rows, FORWARD), here.product(rows))


# The float path: off by default, and limited in memory


CPU = torch.device("cpu")


def test_floats_are_off_by_default(connect: Connect, store: WeightStore) -> None:
    client = connect()
    width = store.manifest().groups[0].inputs
    for arithmetic in ("float", "float_bias_free"):
        for rows in (0, 1):
            reply = client.ask(execute(0, rows, arithmetic=arithmetic), bytes(4 * width * rows))
            assert isinstance(reply, wire.Failure)
            assert reply.code == wire.ErrorCode.NOT_SERVED
            message = str(ProviderError(code=reply.code, provider="alpha", detail=reply.detail))
            assert "float_memory_mib under [executor]" in message
            assert "masking = 'pad'" in message


def test_a_memory_limit_below_all_groups_is_refused(store: WeightStore) -> None:
    needed = -(-sum(4 * entry.stacked_outputs * (entry.inputs + 1) for entry in store.manifest().groups) // MIB)
    with pytest.raises(ConfigError, match=rf"float_memory_mib = {needed - 1} .* set it to {needed} or more"):
        ServedModel(store, float_memory=(needed - 1) * MIB)
    ServedModel(store, float_memory=needed * MIB)
