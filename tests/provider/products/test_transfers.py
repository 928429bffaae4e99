"""Copies to a device and back overlap with products: no order that the device may choose changes a result.

The device is a stub. A stream is a list of operations that have not run. They run in any order that the streams and
their waits for each other permit, at the latest when the host waits for them. Hypothesis chooses order and time.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor
from torch.overrides import TorchFunctionMode

from provider.config.memory_plan import LOCKED_ENTRIES, LOCKED_SLICES
from provider.products.graphs import Graph
from provider.products.model import Transfers, _chunks
from symbiosis_priv.arithmetic.ring import FORWARD, Widths
from symbiosis_priv.kernels import RingMatrix
from symbiosis_priv.limits import RingBits
from symbiosis_priv.network import wire

CPU = torch.device("cpu")


class Device:
    """What `torch.cuda` offers. `choose` takes one of the streams whose next operation may run; if it need not run yet,
    None is a choice, too."""

    def __init__(self, choose: Callable[[list["Queue | None"]], "Queue | None"]) -> None:
        self.choose = choose
        self.streams: list[Queue] = []
        self.current = self.Stream(None)
        self.synchronized = 0

    def Stream(self, device: object) -> "Queue":
        self.streams.append(Queue(self))
        return self.streams[-1]

    def Event(self) -> "Event":
        return Event(self)

    def set_device(self, device: object) -> None:
        pass

    def current_stream(self, device: object) -> "Queue":
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self, device: object) -> None:
        self.synchronized += 1
        self.run(lambda: not any(stream.waiting for stream in self.streams))

    def run(self, done: Callable[[], bool]) -> None:
        """Run operations until `done`."""
        while not done():
            self.step(self.ready())

    def ready(self) -> "list[Queue | None]":
        return [stream for stream in self.streams if stream.waiting and stream.waiting[0].may_run()]

    def step(self, choices: "list[Queue | None]") -> bool:
        """Run one operation. Returns False if none was chosen."""
        if (stream := self.choose(choices)) is None:
            return False
        stream.waiting.pop(0).run()
        return True


class Operation(SimpleNamespace):
    """An operation, which may run after others."""

    finished = False

    def may_run(self) -> bool:
        return all(other.finished for other in self.after)

    def run(self) -> None:
        self.work()
        self.finished = True


class Queue:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.waiting: list[Operation] = []
        self.last: Operation | None = None

    def add(self, work: Callable[[], object], *after: Operation) -> Operation:
        self.last = Operation(work=work, after=after)
        self.waiting.append(self.last)
        while self.device.step([None, *self.device.ready()]):
            pass
        return self.last

    def wait_stream(self, other: "Queue") -> None:
        if other is not self and other.last is not None:
            self.add(lambda: None, other.last)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.recorded: Operation | None = None

    def record(self) -> None:
        self.recorded = self.device.current.add(lambda: None)

    def synchronize(self) -> None:
        recorded = self.recorded
        assert recorded is not None
        self.device.run(lambda: recorded.finished)


class Deferred(TorchFunctionMode):
    """Gives asynchronous copies to the device's current stream."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            target, source = args
            read = list[Tensor]()  # what is on its way: the source may change before the target does
            self.device.current.add(lambda: read.append(source.clone()))
            self.device.current.add(lambda: target.copy_(read[0]))
            return target
        return func(*args, **(kwargs or {}))


class Matrix(RingMatrix):
    """Adds 1 to every entry and repeats the first columns, when the device comes to it."""

    def __init__(self, device: Device, width: int, columns: int) -> None:
        self.on, self.widths = device, Widths(width, columns)

    def columns(self, *_: object, **__: object) -> Widths:
        return self.widths

    def product(self, rows: Tensor, *_: object, out: Tensor | None = None, **__: object) -> Tensor:
        assert out is not None
        self.on.current.add(lambda: out.copy_(expected(rows, self.widths.result)))
        return out


def expected(rows: Tensor, columns: int) -> Tensor:
    return rows[:, torch.arange(columns) % rows.shape[1]] + 1


def transfers_on(device: Device, monkeypatch: pytest.MonkeyPatch, *, chunk: int) -> Transfers:
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    return Transfers(CPU, widest=5, chunk=chunk)


@given(
    data=st.data(),
    chunk=st.integers(1, 3),
    batches=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(1, 7), min_size=1, max_size=4)), min_size=1, max_size=3
    ),
)
def test_no_order_of_the_device_changes_a_product(
    data: DataObject, chunk: int, batches: list[tuple[bool, list[int]]]
) -> None:
    """Of the rows of several requests, in 32 bits or as on the wire in 24."""
    device = Device(lambda ready: data.draw(st.sampled_from(ready)))
    with pytest.MonkeyPatch.context() as patch:
        transfers, results = transfers_on(device, patch, chunk=chunk), []
        for place, (narrow, counts) in enumerate(batches):
            encoding = wire.RING24 if narrow else wire.RING32
            taken = wire.BYTES24 if narrow else wire.RING32
            rows = torch.arange(sum(counts) * 3, dtype=torch.int32).view(-1, 3) * 0x7F4A7C15 + 100 * place
            first, *more = [taken.unpack(bytearray(encoding.pack(p)), rows=len(p)) for p in rows.split(counts)]
            with Deferred(device):
                results.append((encoding, rows, transfers.product(Matrix(device, 3, 5), first, FORWARD, more=more)))
        for encoding, rows, result in results:
            assert (result.dtype == torch.uint8) == (encoding is wire.RING24)
            assert result.numpy().tobytes() == encoding.pack(expected(rows, 5)).tobytes()


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=6), size=st.integers(1, 9))
def test_requests_of_any_size_fill_chunks(counts: list[int], size: int) -> None:
    rows = torch.arange(sum(counts), dtype=torch.int32).view(-1, 1)
    chunks = [torch.cat(chunk) for chunk in _chunks(list(rows.split(counts)), size)]
    assert all(map(torch.equal, chunks, rows.split(size)))
    assert len(chunks) == -(-len(rows) // size)


def test_no_rows_give_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(lambda choices: choices[0])
    transfers = transfers_on(device, monkeypatch, chunk=2)
    assert transfers.product(Matrix(device, 3, 5), torch.zeros((0, 3), dtype=torch.int32), FORWARD).shape == (0, 5)


def test_page_locked_rows_go_to_the_device_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(lambda choices: choices[0])
    transfers, matrix = transfers_on(device, monkeypatch, chunk=2), Matrix(device, 3, 5)
    for slot in transfers._slots:
        slot.host_rows.fill_(77)
    rows = torch.from_numpy(transfers.memory(15)).view(5, 3).copy_(torch.arange(15).view(5, 3))
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor.untyped_storage().data_ptr() == rows.data_ptr())
    with Deferred(device):
        assert torch.equal(transfers.product(matrix, rows, FORWARD), expected(rows, 5))
    assert all((slot.host_rows == 77).all() for slot in transfers._slots)
    with Deferred(device):
        assert torch.equal(transfers.product(matrix, rows.clone(), FORWARD), expected(rows, 5))


def test_page_locked_memory_is_a_fixed_number_of_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice is used again when nothing refers to it. Meanwhile, further rows get ordinary memory, as do long ones."""
    transfers = transfers_on(Device(lambda choices: choices[0]), monkeypatch, chunk=2)
    held = [transfers.memory(100 + place) for place in range(LOCKED_SLICES)]
    assert [len(part) for part in held] == list(range(100, 100 + LOCKED_SLICES))
    slices = {part.ctypes.data for part in held}
    assert len(slices) == LOCKED_SLICES
    others = transfers.memory(100), transfers.memory(LOCKED_ENTRIES + 1)
    assert slices.isdisjoint(part.ctypes.data for part in others)
    view = wire.RING32.unpack(wire.RING32.pack(torch.from_numpy(held[0][4:16].reshape(3, 4))), rows=3)
    address = held.pop(0).ctypes.data
    addresses = [transfers.memory(100).ctypes.data]  # a view is left
    del view
    addresses += [transfers.memory(100).ctypes.data for _ in range(2)]
    assert addresses[0] not in slices
    assert addresses[1:] == [address] * 2
    del held, others
    assert len(transfers._locked) == LOCKED_SLICES


@given(data=st.data(), shapes=st.lists(st.tuples(st.integers(1, 3), st.sampled_from([24, 32])), min_size=1, max_size=8))
def test_no_order_of_the_device_changes_a_product_of_few_rows(
    data: DataObject, shapes: list[tuple[int, RingBits]]
) -> None:
    """From payload to payload; products of other sizes use the same memory."""
    device = Device(lambda ready: data.draw(st.sampled_from(ready)))
    with pytest.MonkeyPatch.context() as patch:
        transfers, matrix = transfers_on(device, patch, chunk=4), Matrix(device, 3, 5)
        products = {shape: transfers.few(matrix, FORWARD, *shape) for shape in shapes}
        for place, (count, ring_bits) in enumerate(shapes):
            encoding, whole = wire.encoding_of("ring", ring_bits), torch.arange(12, dtype=torch.int32).view(4, 3)
            rows = torch.full((count, 3), place - 4, dtype=torch.int32) + torch.arange(3, dtype=torch.int32)
            sent, space = np.frombuffer(encoding.pack(rows), np.uint8), np.empty(encoding.size(count, 5), np.uint8)
            with Deferred(device):
                product = products[count, ring_bits]
                assert product is not None
                product(sent.ctypes.data, space.ctypes.data)
                assert torch.equal(transfers.product(matrix, whole, FORWARD), expected(whole, 5))
            assert space.data == encoding.pack(expected(rows, 5))


def test_nothing_is_in_flight_after_few_rows_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(lambda choices: choices[0])
    transfers, matrix = transfers_on(device, monkeypatch, chunk=2), Matrix(device, 3, 5)

    def fail(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(matrix, "product", fail)
    space = np.zeros(20, dtype=np.int32)
    product = transfers.few(matrix, FORWARD, 1, 32)
    assert product is not None
    assert transfers.few(matrix, FORWARD, 3, 32) is None  # more than a slot holds
    with Deferred(device), pytest.raises(torch.OutOfMemoryError):
        product(space.ctypes.data, space.ctypes.data)
    assert device.synchronized == 1
    assert not any(stream.waiting for stream in device.streams)


class FakeGraph:
    """A CUDA graph that records what is started during its capture."""

    failing: ClassVar[bool] = False
    begun: ClassVar[list[dict[str, Any]]] = []

    def capture_begin(self, **options: Any) -> None:
        FakeGraph.begun.append(options)
        started.clear()
        if FakeGraph.failing:
            raise RuntimeError("operation not permitted when stream is capturing")

    def capture_end(self) -> None:
        self.work = list(started)

    def replay(self) -> None:
        replayed.append(list(self.work))


started, replayed = list[str](), list[list[str]]()


@pytest.mark.parametrize("failing", [False, True])
def test_the_second_product_of_a_shape_is_captured(failing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(FakeGraph, "failing", failing)
    for calls in (FakeGraph.begun, started, replayed):
        calls.clear()
    graph = Graph(lambda: started.append("product"), torch.device("cuda:1"), stream=None, pool=7)
    graph()
    assert (started, FakeGraph.begun) == (["product"], [])
    graph()
    graph()
    assert graph.captured is not failing
    assert [options["pool"] for options in FakeGraph.begun] == [7]
    assert isinstance(graph._graph, FakeGraph)  # torch's allocator asks it later, also if the capture has failed
    if failing:
        assert (started, replayed) == (["product"] * 2, [])
    else:
        assert (started, replayed) == (["product"], [["product"]] * 2)


@pytest.mark.parametrize("failing", range(4))
def test_nothing_is_in_flight_after_a_product_that_fails(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the device has no memory for a kernel's own buffers. Copies would disturb the next product."""
    device = Device(lambda choices: choices[0])  # nothing runs before it must
    transfers, matrix, calls = transfers_on(device, monkeypatch, chunk=2), Matrix(device, 3, 5), iter(range(4))

    def fail(*arguments: Any, **options: Any) -> Tensor:
        if next(calls) == failing:
            raise torch.OutOfMemoryError("out of memory")
        return Matrix.product(matrix, *arguments, **options)

    monkeypatch.setattr(matrix, "product", fail)
    with Deferred(device), pytest.raises(torch.OutOfMemoryError):
        transfers.product(matrix, torch.zeros((8, 3), dtype=torch.int32), FORWARD)
    assert not any(stream.waiting for stream in device.streams)


def test_one_part_needs_no_second_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events between streams would take as long as a small product."""
    device = Device(lambda choices: choices[0])
    transfers, matrix = transfers_on(device, monkeypatch, chunk=4), Matrix(device, 3, 5)
    for count, streams in ((0, 1), (1, 1), (4, 1), (5, 3)):
        for stream in device.streams:
            stream.last = None
        with Deferred(device):
            transfers.product(matrix, torch.ones((count, 3), dtype=torch.int32), FORWARD)
        assert sum(stream.last is not None for stream in device.streams) == streams
    assert not device.synchronized  # the host waits for its own product only
