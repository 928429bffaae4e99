"""Messages between senders and the executor; the stage of a request; keystreams in the background."""

import contextlib
import resource
import threading
import time
from pathlib import Path

import pytest
import torch

from provider.config.schema import ExecutorConfig
from provider.executor.queues import ExecutorAnswer, KeystreamMaker, LocalInbox, ReportRequest, Stages
from provider.executor.supervisor import ExecutorProcess, SocketInbox, make
from provider.gateway.gateway import MAX_HANDSHAKES
from provider.scheduler.jobs import Job
from provider.serve import allow_descriptors
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity
from tests.provider.conftest import Configure
from tests.provider.scheduler.playing import job
from tests.waiting import until


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_every_connection_has_its_descriptors_and_gets_its_answer(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ's default limit is 1,023 sockets, and select's are 1,023 descriptors. A pipe's other end is in this
    process too, in place of the tenant's connection: the limit leaves room for both, and for unauthenticated ones."""
    config = configure(max_connections=1100, executor=ExecutorConfig(own_process=True))
    allow_descriptors(config)
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1 << 20))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    allow_descriptors(config)
    before = descriptors()
    executor = make(config, model_digest="")
    assert isinstance(executor, ExecutorProcess)
    with contextlib.closing(SocketInbox(executor.endpoint)) as inbox, contextlib.ExitStack() as pipes:
        for _ in range(1100):
            pipe = pipes.enter_context(contextlib.closing(executor.open_pipe()))
        pipe.send(ReportRequest())
        while not (arrived := list(inbox.arrived())):  # ZeroMQ's own handshake messages wake it, too
            inbox.wait(30.0)
        assert pipe.receive(0.01) is None  # it waits, and announces that it does
        until(lambda: descriptors() - before >= 3 * 1100)
        assert raised[0][0] >= descriptors() - before + MAX_HANDSHAKES
        inbox.answer([(arrived[0].sender, ExecutorAnswer(b"failed", memoryview(b"rows"), 1))])
        answer = pipe.receive(30.0)
        assert answer is not None
        assert (answer.failure, bytes(answer.payload), answer.rows) == (b"failed", b"rows", 1)
    executor.stop(1.0)
    executor.close()


def test_every_sender_of_a_product_gets_its_answer_and_none_is_lost_at_the_end() -> None:
    """Several senders are woken by a thread of their own; one sender is woken at once."""
    inbox = LocalInbox()
    pipes = [inbox.open_pipe() for _ in range(3)]
    for pipe in pipes:
        pipe.send(ReportRequest())
    senders = [message.sender for message in inbox.arrived()]
    answers = [ExecutorAnswer(bytes([number]), memoryview(b"rows"), 1) for number in range(3)]
    inbox.answer(list(zip(senders, answers, strict=True)))
    inbox.answer([(senders[0], answers[2])])
    inbox.close()
    received = [pipe.receive(0.0) for pipe in pipes]
    assert {answer.failure for answer in received if answer is not None} in ({b"\0", b"\1", b"\2"}, {b"\2", b"\1"})
    assert pipes[0].receive(0.0) is not None


def ask(direction: Direction, rows: int) -> wire.Execute:
    return wire.Execute(nonce=bytes(16), group=0, direction=direction, arithmetic="ring", rows=rows)


ALICE, BOB = (TenantIdentity(name, authority="sha256:a") for name in ("alice", "bob"))


def test_few_rows_forward_are_inference_unless_their_tenant_trains() -> None:
    stages = Stages()
    assert stages.of(ALICE, ask("forward", 2), 0.0) == "inference"  # no earlier request
    assert stages.of(ALICE, ask("backward", 2), 1.0) == "fine_tuning"
    assert stages.of(ALICE, ask("forward", 2), 2.0) == "fine_tuning"
    assert stages.of(BOB, ask("forward", 2), 2.0) == "inference"
    assert stages.of(BOB, ask("forward", 17), 2.0) == "fine_tuning"
    assert stages.of(BOB, ask("forward", 16), 3.0) == "inference"
    assert stages.of(ALICE, ask("forward", 1), 60.0) == "fine_tuning"
    assert stages.of(ALICE, ask("forward", 1), 62.0) == "inference"


def collect(maker: KeystreamMaker[Job], count: int, woken: threading.Semaphore) -> list[tuple[Job, object]]:
    found: list[tuple[Job, object]] = []
    deadline = time.monotonic() + 20
    while len(found) < count:
        assert woken.acquire(timeout=20)
        assert time.monotonic() < deadline
        found += maker.made()
    return found


def test_tenants_take_turns_and_errors_are_reported() -> None:
    woken, go_on = threading.Semaphore(0), threading.Event()
    maker: KeystreamMaker[Job] = KeystreamMaker(woken.release)
    first, bob, gone, *alice = (job(tenant) for tenant in ("alice", "bob", "carol", "alice", "alice", "alice"))

    def blocked() -> torch.Tensor:
        assert go_on.wait(20)
        return torch.zeros(1, 1, dtype=torch.int32)

    def failing() -> torch.Tensor:
        raise ValueError

    maker.order(first, blocked)  # the other requests queue meanwhile
    for one in (*alice, gone):
        maker.order(one, lambda: torch.zeros(1, 1, dtype=torch.int32))
    maker.order(bob, failing)
    gone.left = True
    go_on.set()
    made = collect(maker, 5, woken)
    jobs = [one for one, _ in made]
    assert jobs.index(bob) < jobs.index(alice[1])
    assert sorted(map(id, jobs)) == sorted(map(id, [first, *alice, bob]))
    assert isinstance(dict(made)[bob], ValueError)
    maker.close()
    maker.close()  # closing twice does nothing
