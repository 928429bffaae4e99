"""`bench ranks`: what tenants notice when a rank of a sharded executor is killed, or hangs.

Tenants, each a process with a session of its own, ask for one product after the other without a pause, and compare
every one with their own. A rank of the group that is asked most is killed (SIGKILL) or stopped (SIGSTOP); the provider
has to notice, say who is missing, and start the group again. Once there is this group alone, so that everybody waits
for its return, and once there is a second one to go to. A second group would have a machine of its own: so the one that
has lost a rank then comes back with little priority, and takes longer.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from symbiosis_priv.certificates import Identity, Kind, issue
from symbiosis_priv.errors import DeadlineExceededError, ProtocolError, SymbiosisError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.local import LocalFederation
from symbiosis_priv.ring import FORWARD
from symbiosis_priv.weights import WeightStore
from tenant.bench import processes
from tenant.bench.contest import START_S, Shape
from tenant.bench.report import Row
from tenant.bench.status import METRICS, status_of
from tenant.masking.registry import session_scheme
from tenant.preparation import prepare
from tenant.session.options import SessionOptions
from tenant.session.session import Session
from tenant.verifier import DEFAULT_COLUMNS

LOSSES: Final = {"a rank is killed": signal.SIGKILL, "a rank hangs": signal.SIGSTOP}
"""What happens, and by which signal."""

_GROUP = 0  # q, k and v
_LARGEST = 100  # of a row's entries: the true product is in the range
_PATIENCE_S = 120.0
_LOOK_S = 0.1
_NICE = 19
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class _Tenant:
    """Who asks, for what.

    Args:
        federation, model, cache: where things are.
        identity: the tenant's own.
        masking: the scheme.
        rows: of each product.
    """

    federation: Path
    model: Path
    cache: Path
    identity: Identity
    masking: str
    rows: int


class _Answer(NamedTuple):
    """Times by `time.monotonic`, which all processes of a machine share."""

    asked: float
    answered: float
    right: bool


@dataclass(frozen=True)
class _Loss:
    """What became of a group that has lost a rank.

    Args:
        at, back: when it lost it, and when it was ready again.
        named: whether its log says which rank.
        before, after: what the provider and its ranks held.
    """

    what: str
    at: float
    back: float
    named: bool
    before: _Held
    after: _Held


class _Held(NamedTuple):
    """By all processes of a provider."""

    processes: int
    threads: int
    files: int
    bytes: int


def measure_ranks(
    directory: Path,
    shape: Shape,
    *,
    groups: Sequence[int] = (1, 2),
    losses: Collection[str] = LOSSES.keys(),
    ranks: int,
    tenants: int,
    rows: int,
    masking: str,
    seconds: float,
    on_event: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """A row for each number of groups and each loss.

    Args:
        directory: new or empty.
        shape: of the model.
        groups: executors that there are.
        losses: names of LOSSES.
        ranks: of each group.
        tenants: that ask at once.
        rows: of each of their products.
        masking: the scheme.
        seconds: before each loss, and after each return.
        on_event: told what happens.

    Raises:
        DeadlineExceededError: a group did not come back.
        ProtocolError: a tenant could not go on.
    """
    processes.check_supported()
    model = shape.save(directory / "model")
    options: dict[str, dict[str, object]] = {
        "executor": {"threads": 1, "ranks": ranks},
        "metrics": METRICS,
    }
    found: list[Row] = []
    for (number, executors), what in itertools.product(enumerate(groups), losses):
        on_event(f"{executors} x {ranks} ranks: {what}")
        local = LocalFederation(
            model,
            directory / f"{number}-{what.replace(' ', '-')}",
            executors=executors,
            helpers=int("helper" in session_scheme(masking).roles),
            cache=directory / "cache",
            provider_options=options,
            deadline_s=START_S,
        )
        with local, _asking(local, tenants=tenants, rows=rows, masking=masking) as collect:
            loss = _lose(local, what, seconds=seconds)
            found.append(_row(loss, collect(), seconds=seconds, executors=executors, ranks=ranks, tenants=tenants))
    return found


def _lose(local: LocalFederation, what: str, *, seconds: float) -> _Loss:
    """Take a rank from the executor that is asked most, and wait until it has got over it."""
    executors = [name for name in local.names if name.startswith("executor")]
    earlier = {name: status_of(local, name) for name in executors}
    time.sleep(seconds)
    statuses = {name: status_of(local, name) for name in executors}
    victim = max(executors, key=lambda name: _requests(statuses[name]) - _requests(earlier[name]))
    gateway, said = local.pid(victim), len(local.logs(victim))
    assert gateway is not None, "it has just answered"
    before, ranks = _held(gateway), _ranks(gateway)
    last = max(ranks)
    if len(executors) > 1:
        _give_way(gateway)
    at = time.monotonic()
    os.kill(ranks[last], LOSSES[what])
    while not ((now := status_of(local, victim))["ready"] and now["restarts"] > statuses[victim]["restarts"]):
        if time.monotonic() > at + _PATIENCE_S:
            raise DeadlineExceededError(f"{victim} is not back {_PATIENCE_S:g} s after {what}")
        time.sleep(_LOOK_S)
    back = time.monotonic()
    time.sleep(seconds)
    named = re.search(rf"\brank\s*:? {last}\b", local.logs(victim)[said:]) is not None
    return _Loss(what, at, back, named, before, _held(gateway))


def _row(loss: _Loss, answers: Sequence[_Answer], *, seconds: float, executors: int, ranks: int, tenants: int) -> Row:
    before = [a for a in answers if loss.at - seconds <= a.asked and a.answered < loss.at]
    meanwhile = [a for a in answers if a.answered >= loss.at and a.asked < loss.back]
    if not before or not meanwhile:
        raise ProtocolError("too few answers to compare: measure for longer (--seconds)")
    usual, during = (np.array([1000 * (a.answered - a.asked) for a in some]) for some in (before, meanwhile))
    left = [now - then for now, then in zip(loss.after, loss.before, strict=True)]
    return {
        "lost": loss.what,
        "groups": executors,
        "ranks": ranks,
        "tenants": tenants,
        "back_after_s": loss.back - loss.at,
        "before_p50_ms": float(np.percentile(usual, 50)),
        "meanwhile_p50_ms": float(np.percentile(during, 50)),
        "meanwhile_over_before": float(np.percentile(during, 50) / np.percentile(usual, 50)),
        "before_p99_ms": float(np.percentile(usual, 99)),
        "meanwhile_p99_ms": float(np.percentile(during, 99)),
        "longest_s": float(max(during)) / 1000,
        "answers": len(before) + len(meanwhile),
        "wrong": sum(not a.right for a in (*before, *meanwhile)),
        "named": "yes" if loss.named else "NO",
        "left_processes": left[0],
        "left_threads": left[1],
        "left_files": left[2],
        "left_mib": left[3] / _MIB,
    }


# Tenants


@contextmanager
def _asking(local: LocalFederation, *, tenants: int, rows: int, masking: str) -> Iterator[Callable[[], list[_Answer]]]:
    """Tenants that ask until the call that collects what they got."""
    keys = local.directory / "keys"
    authority = Identity(certificate=keys / "authority.pem", key=keys / "authority.key")
    context = multiprocessing.get_context("spawn")
    running: list[tuple[BaseProcess, Connection]] = []

    def collect() -> list[_Answer]:
        for _, pipe in running:
            pipe.send(None)
        return [answer for _, pipe in running for answer in _received(pipe)]

    try:
        for number in range(tenants):
            identity = issue(keys, authority=authority, kind=Kind.TENANT, name=f"tenant-{number}")
            tenant = _Tenant(
                federation=local.federation,
                model=local.model,
                cache=local.cache,
                identity=identity,
                masking=masking,
                rows=rows,
            )
            here, there = context.Pipe()
            process: BaseProcess = context.Process(target=_run, args=(tenant, there), daemon=True)
            process.start()
            there.close()
            running.append((process, here))
        for _, pipe in running:
            _received(pipe)
        yield collect
    finally:
        for process, pipe in running:
            process.kill()
            process.join()
            pipe.close()


def _received(pipe: Connection) -> list[_Answer]:
    try:
        if not pipe.poll(_PATIENCE_S):
            raise DeadlineExceededError(f"a tenant has said nothing for {_PATIENCE_S:g} s")
        found: list[_Answer] | str = pipe.recv()
    except EOFError as error:
        raise ProtocolError("a tenant has ended; its reason is above") from error
    if isinstance(found, str):
        raise ProtocolError(f"a tenant could not go on: {found}")
    return found


def _run(tenant: _Tenant, pipe: Connection) -> None:
    """Says that it has begun, asks until it is told to stop, and says what it got, or what went wrong."""
    torch.set_num_threads(1)
    try:
        _ask(tenant, pipe)
    except SymbiosisError as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _ask(tenant: _Tenant, pipe: Connection) -> None:
    federation = replace(
        load_federation(tenant.federation),
        tenant_certificate=tenant.identity.certificate,
        tenant_key=tenant.identity.key,
    )
    store = WeightStore(tenant.model, cache=tenant.cache)
    preparation = prepare(store, digest=federation.model_digest, columns=DEFAULT_COLUMNS, cache=tenant.cache)
    inputs, _ = preparation.facts[_GROUP].entry.columns(FORWARD)
    rows = torch.randint(-_LARGEST, _LARGEST + 1, (tenant.rows, inputs), dtype=torch.int32, device="cpu")
    expected = store.matrix(_GROUP).product(rows)
    options = SessionOptions(masking=tenant.masking, deadline_s=_PATIENCE_S)
    answers: list[_Answer] = []
    with contextlib.closing(Session(federation, preparation, options=options, store=store)) as session:
        session.product(_GROUP, FORWARD, rows)
        pipe.send([])
        while not pipe.poll():
            asked = time.monotonic()
            product = session.product(_GROUP, FORWARD, rows)
            answers.append(_Answer(asked, time.monotonic(), torch.equal(product, expected)))
    pipe.send(answers)


# Providers


def _requests(status: dict[str, Any]) -> int:
    return sum(tenant["counts"]["requests"] for tenant in status["tenants"])


def _give_way(gateway: int) -> None:
    """Whatever a provider starts from now on takes what others leave of this machine."""
    for task in Path(f"/proc/{gateway}/task").iterdir():
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(task.name), _NICE)


def _ranks(gateway: int) -> dict[int, int]:
    """Process ids by rank."""
    found = {}
    for pid in processes.tree(gateway):
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(b"RANK="):
                    found[int(entry.removeprefix(b"RANK="))] = pid
    return found


def _held(gateway: int) -> _Held:
    """What a provider and its descendants hold."""
    pids = processes.tree(gateway)
    threads = files = pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{pid}")
            pages += int((folder / "statm").read_text().split()[1])
            threads += len(list((folder / "task").iterdir()))
            files += len(list((folder / "fd").iterdir()))
    return _Held(len(pids), threads, files, pages * os.sysconf("SC_PAGE_SIZE"))
