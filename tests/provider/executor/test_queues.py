"""Messages between senders and the executor; the stage of a request; keystreams in the background."""

import contextlib
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from provider.executor.queues import ExecutorAnswer, KeystreamMaker, LocalInbox, ReportRequest, Stages
from provider.executor.supervisor import Context, SocketInbox, SocketPipe
from provider.scheduler.jobs import Job
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity
from tests.provider.scheduler.playing import job

_MANY = 1100  # more descriptors than select supports


@contextlib.contextmanager
def crowd() -> Iterator[None]:
    """Open many descriptors in this process, as a provider with many connections has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * _MANY:
        pytest.skip(f"the system allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * _MANY), hard))
    with contextlib.ExitStack() as files:
        for _ in range(_MANY):
            files.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_answers_arrive_with_any_number_of_open_descriptors(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/executor.sock"
    context: Context = zmq.Context()
    with contextlib.closing(SocketInbox(endpoint)) as inbox, crowd():
        with contextlib.closing(SocketPipe(context, endpoint)) as pipe:
            pipe.send(ReportRequest())
            while not (arrived := list(inbox.arrived())):  # ZeroMQ's own handshake messages wake it, too
                inbox.wait(30.0)
            assert pipe.receive(0.01) is None  # it waits, and announces that it does
            inbox.answer([(arrived[0].sender, ExecutorAnswer(b"failed", memoryview(b"rows"), 1))])
            answer = pipe.receive(30.0)
            assert answer is not None
            assert (answer.failure, bytes(answer.payload), answer.rows) == (b"failed", b"rows", 1)
        context.term()


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


@pytest.mark.parametrize(("later", "stage"), [(59.0, "fine_tuning"), (61.0, "inference")])
def test_a_tenant_that_has_stopped_training_counts_as_inference_again(later: float, stage: str) -> None:
    stages = Stages()
    stages.of(ALICE, ask("backward", 2), 0.0)
    assert stages.of(ALICE, ask("forward", 1), later) == stage


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
