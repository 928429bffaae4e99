"""The thread that computes a product: the executor's own, or the thread of a sender that finds the executor idle."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from provider.config.schema import ExecutorConfig
from provider.executor.executor import Executor
from provider.executor.queues import ExecutorReport, LocalInbox, ProductRequest, ReportRequest, RequestPipe
from provider.executor.supervisor import ExecutorThread
from provider.products.model import ServedModel
from provider.scheduler.jobs import Stage
from provider.scheduler.scheduler import Scheduler
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import DeviceLostError, RankLostError
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity
from tests.provider.clients import execute
from tests.provider.conftest import Configure
from tests.waiting import until

TIMEOUT_S = 20.0


class Watched(ServedModel):
    """Records the thread of each product, and can block products."""

    def __init__(self, store: WeightStore) -> None:
        super().__init__(store)
        self.taken: list[tuple[threading.Thread, int]] = []
        self.entered = threading.Event()
        self.open = threading.Event()
        self.open.set()
        self.broken = False

    def product(self, rows: Tensor, **what: Any) -> Tensor:
        self.taken.append((threading.current_thread(), len(rows)))
        self.entered.set()
        assert self.open.wait(TIMEOUT_S)
        if self.broken:
            raise RankLostError("rank 1 does not answer")
        return super().product(rows, **what)


class Asker:
    """The pipe of one tenant."""

    def __init__(self, inbox: LocalInbox, store: WeightStore, name: str = "alice") -> None:
        self.pipe: RequestPipe = inbox.open_pipe()
        self._width = store.manifest().groups[0].inputs
        self._tenant = TenantIdentity(name, authority="sha256:1")

    def message(self, rows: int, stage: Stage = "inference") -> ProductRequest:
        now = time.monotonic()
        request = execute(0, rows)
        return ProductRequest(
            tenant=self._tenant, stage=stage, weight=1.0, arrival=now, deadline=now + TIMEOUT_S, request=request
        )

    def send(self, rows: int, stage: Stage = "inference") -> None:
        self.pipe.send(self.message(rows, stage), wire.RING32.pack(torch.ones(rows, self._width, dtype=torch.int32)))

    def ask(self, rows: int, stage: Stage = "inference") -> None:
        self.send(rows, stage)
        assert self.pipe.receive(TIMEOUT_S) is not None

    def report(self) -> ExecutorReport:
        self.pipe.send(ReportRequest())
        answer = self.pipe.receive(TIMEOUT_S)
        assert answer is not None
        return msgspec.json.decode(answer.payload, type=ExecutorReport)


@contextlib.contextmanager
def running(model: Watched) -> Iterator[tuple[LocalInbox, Future[None]]]:
    """An executor in a separate thread."""
    inbox = LocalInbox()
    executor = Executor(model, inbox=inbox)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(executor.run)
        try:
            yield inbox, ended
        finally:
            executor.stop()


def find_it_at_rest(asker: Asker, model: Watched) -> None:
    """Send requests until this thread computes the answer: the executor's thread rests a moment after its last
    answer."""
    deadline = time.monotonic() + TIMEOUT_S
    while not model.taken or model.taken[-1][0] is not threading.current_thread():
        assert time.monotonic() < deadline
        asker.ask(1)


def test_few_rows_are_multiplied_in_the_senders_thread(store: WeightStore) -> None:
    model = Watched(store)
    with running(model) as (inbox, _):
        asker = Asker(inbox, store)
        find_it_at_rest(asker, model)
        asker.send(3)
        answer = asker.pipe.receive(0.0)  # already arrived
        assert answer is not None
        assert model.taken[-1] == (threading.current_thread(), 3)
        got = wire.RING32.unpack(bytearray(answer.payload), rows=3)
        assert torch.equal(got[0], store.group(0).weight.to(torch.int32).sum(1, dtype=torch.int32))

        asker.ask(3, stage="fine_tuning")
        assert model.taken[-1][0] is not threading.current_thread()
        report = asker.report()
        assert sum(report.batch_rows.counts) == len(model.taken)
        assert 0 < report.seconds < report.uptime - report.idle


def test_an_exception_in_a_senders_thread_ends_the_executor(store: WeightStore) -> None:
    model = Watched(store)
    with running(model) as (inbox, ended):
        asker = Asker(inbox, store)
        find_it_at_rest(asker, model)
        model.broken = True
        asker.send(1)
        with pytest.raises(RankLostError):
            ended.result(TIMEOUT_S)
        taken = len(model.taken)
        asker.send(1)  # the executor has ended
        assert asker.pipe.receive(0.0) is None
        assert len(model.taken) == taken


def test_a_device_that_has_failed_ends_the_executor_and_a_lack_of_memory_does_not(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an illegal access CUDA answers every call with the same error: only a new process can continue."""
    model = Watched(store)
    with running(model) as (inbox, ended):
        asker = Asker(inbox, store)
        find_it_at_rest(asker, model)
        full = raising(torch.OutOfMemoryError("out of memory"))
        monkeypatch.setattr(Watched, "product", full)
        with monkeypatch.context() as patch:
            patch.setattr("provider.products.model.torch.zeros", full)  # the device has no byte left
            asker.ask(1)
        asker.ask(1)
        assert not ended.done()
        monkeypatch.setattr(Watched, "product", raising(RuntimeError("CUDA error: an illegal memory access")))
        monkeypatch.setattr("provider.products.model.torch.zeros", raising(RuntimeError("CUDA error: the same")))
        asker.send(1)
        with pytest.raises(DeviceLostError):
            ended.result(TIMEOUT_S)


def test_a_lack_of_memory_in_the_senders_thread_ends_nothing(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor's own thread takes the request. Any error of a product of few rows is one of that request alone."""
    model = Watched(store)
    monkeypatch.setattr(model, "few", lambda request: raising(MemoryError()))
    with running(model) as (inbox, ended):
        asker = Asker(inbox, store)
        find_it_at_rest(asker, model)
        repeated = asker.pipe.repeat(asker.message(1))
        assert repeated is not None
        for _ in range(3):
            until(lambda: not repeated.multiply(time.monotonic(), 0, 0))
            asker.ask(1)
        assert not ended.done()


def test_an_executor_that_has_ended_multiplies_nothing_at_once(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one takes its place, and connections still have what the ended one has given them."""
    model = Watched(store)
    with running(model) as (inbox, ended):
        asker = Asker(inbox, store)
        find_it_at_rest(asker, model)
        repeated = asker.pipe.repeat(asker.message(1))
        assert repeated is not None
        _, outputs = store.manifest().groups[0].columns("forward")
        payload = wire.RING32.pack(torch.ones(1, store.manifest().groups[0].inputs, dtype=torch.int32))
        sent, space = np.frombuffer(payload, dtype=np.int32), np.empty(outputs, dtype=np.int32)

        def multiply() -> bool:
            return repeated.multiply(time.monotonic(), sent.ctypes.data, space.ctypes.data)

        take, errors = Scheduler.take_alone, [MemoryError()]
        monkeypatch.setattr(Scheduler, "take_alone", lambda *of: raising(errors.pop())() if errors else take(*of))
        while not ended.done():  # the products are recorded after some, which fails
            if multiply():
                repeated.after()
        assert isinstance(ended.exception(TIMEOUT_S), MemoryError)
        assert not multiply()


def raising(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(("device", "ends"), [("cpu", False), ("cuda:0", True)])
def test_a_process_with_a_gpu_ends_when_its_executor_fails(
    device: str, ends: bool, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of connections keep the old weights, and the card has no room for the same weights again."""
    handle = ExecutorThread(configure(executor=ExecutorConfig(device=device)), model_digest="sha256:1")
    built, ended = list[int](), list[int]()

    def fail() -> None:
        raise ValueError("a defect")

    handle._executor = SimpleNamespace(run=fail)  # type: ignore[assignment]
    monkeypatch.setattr(handle, "_build", lambda: built.append(1))
    monkeypatch.setattr(os, "_exit", ended.append)
    assert handle._ended_by_error()
    assert (bool(ended), built) == (ends, [1])  # with a real `_exit`, nothing is built
