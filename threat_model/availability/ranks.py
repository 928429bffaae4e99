"""`bench ranks`: measures how a killed or hanging rank of a sharded executor affects tenants.

Each tenant is a process with its own session. The tenant requests one product after the other and compares each answer
with its own product. A rank of the busiest group is killed (SIGKILL) or stopped (SIGSTOP). The provider must detect the
loss, name the rank, and restart the group. With one group, all tenants wait for the restart; with two groups, they can
use the other group. In practice a second group has its own machine. So the restarting group has low priority here,
unless `apart` is False, and its restart takes longer. With a gateway for each rank, the whole provider ends with its
rank. The benchmark starts it again, as systemd would.
"""

import contextlib
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import torch
from typer import Option

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.certificates.reading import Identity
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import DeadlineExceededError, ProtocolError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.harness.local import METRICS, LocalFederation
from symbiosis_priv.limits import GroupIndex
from tenant.bench import processes
from tenant.bench.measured_models import Llama, provide
from tenant.bench.options import Masking, Progress, benchmark, numbers
from tenant.bench.report import Goal, Row, figure, where
from tenant.core.blame import DEFAULT_COLUMNS
from tenant.masking.registry import session_scheme
from tenant.options import SessionOptions
from tenant.preparation.keys import prepare
from tenant.session.session import Session

LOSSES: Final = {"a rank is killed": signal.SIGKILL, "a rank hangs": signal.SIGSTOP}
"""What happens to a rank, and by which signal."""

_LOOK_S = 0.1
_NICE = 19
_MIB = 1 << 20
PATIENCE_S = 120.0
_GROUP = GroupIndex(0)  # the group of q, k and v
_LARGEST = 100  # largest entry of a row, so that the exact product is in the range


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Sharded executors, and the tenants that send requests to them. `pause_s`: pause of a tenant between two requests,
    so that the restarting group gets processor time."""

    ranks: Annotated[int, Option(min=2, help="Processes of each executor.")] = 2
    tenants: Annotated[int, Option(min=1, help="Tenants that send requests at once.")] = 2
    rows: Annotated[int, Option(min=1, help="Rows of each request.")] = 1
    masking: Masking = "pad"
    seconds: Annotated[float, Option(min=0.1, help="Seconds before each loss and after each restart.")] = 3.0
    apart: Annotated[
        bool,
        Option(
            "--apart/--together",
            help="Let a group that starts again leave the cores to another group, as if each had its own machine.",
        ),
    ] = True
    gateways: Annotated[bool, Option("--gateways", help="Give every rank a gateway.")] = False
    pause_s: float = 0.0


_SHAPE, _SHARDING = Llama(width=512, layers=1, inner=1408), Sharding()


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in rows:
        if figure(row, "groups") > 1:  # with one group of ranks, every tenant waits for its restart
            what = f"others' median over before: {row['lost']}"
            yield Goal(what, figure(row, "meanwhile_over_before"), at_most=1.5)


def faults(rows: Sequence[Row]) -> Iterator[str]:
    for row in where(rows, named="NO"):
        yield f"the log does not say which rank was lost: {row['lost']}"


@benchmark("ranks", goals=goals, faults=faults)
def ranks(
    folder: Path,
    progress: Progress,
    *,
    shape: Llama = _SHAPE,
    groups: Annotated[str, Option(help="Numbers of executors, separated by commas.")] = "1,2",
    sharding: Sharding = _SHARDING,
) -> Iterator[Row]:
    """Kill and stop ranks of a sharded executor while tenants send requests, with one group and with two groups.

    Status 1 if one bit of the results differs, or if the log does not name the lost rank.

    Example: symbiosis-priv bench ranks --groups 2 --tenants 4
    """
    return measure_ranks(folder, shape, sharding, groups=numbers(groups, "--groups"), on_event=progress)


class TimedAnswer(NamedTuple):
    """The times of one answer by `time.monotonic`, a clock that all processes of a machine share."""

    asked: float
    answered: float
    right: bool


@contextmanager
def serve_requests(
    path: Path, model: Path, cache: Path, identity: Identity, options: Sharding
) -> Iterator[Callable[[None], list[TimedAnswer]]]:
    """The work of a `Child`: sends requests until the parent's first question. Its reply has the times of all answers.
    `options`: masking, rows of each request, and the pause between two of them."""
    torch.set_num_threads(1)
    federation = replace(load_federation(path), tenant_certificate=identity.certificate, tenant_key=identity.key)
    store = WeightStore(model, cache=cache)
    preparation = prepare(store, digest=federation.model_digest, columns=DEFAULT_COLUMNS, cache=cache)
    inputs, _ = preparation.facts[_GROUP].entry.columns(FORWARD)
    rows = torch.randint(-_LARGEST, _LARGEST + 1, (options.rows, inputs), dtype=torch.int32, device="cpu")
    expected = store.matrix(_GROUP).product(rows)
    session_options = SessionOptions(masking=options.masking, deadline_s=PATIENCE_S)
    stopped = threading.Event()

    def ask_repeatedly(session: Session) -> list[TimedAnswer]:
        answers = []
        while not stopped.is_set():
            asked = time.monotonic()
            product = session.product(_GROUP, FORWARD, rows)
            answers.append(TimedAnswer(asked, time.monotonic(), torch.equal(product, expected)))
            if options.pause_s:
                stopped.wait(options.pause_s)
        return answers

    with (
        contextlib.closing(Session(federation, preparation, options=session_options, store=store)) as session,
        ThreadPoolExecutor(1) as thread,
    ):
        session.product(_GROUP, FORWARD, rows)
        running = thread.submit(ask_repeatedly, session)

        def stop(_: None) -> list[TimedAnswer]:
            stopped.set()
            return running.result()

        try:
            yield stop
        finally:
            stopped.set()


class _Loss(NamedTuple):
    """When a group lost a rank and was ready again, whether the log names the rank, and how resources have grown."""

    at: float
    back: float
    named: bool
    left: processes.Resources


def measure_ranks(
    directory: Path,
    shape: Llama,
    sharding: Sharding,
    *,
    groups: Sequence[int],
    losses: Collection[str] = LOSSES.keys(),
    on_event: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """A row for each number of groups and each loss. Raises `SymbiosisError`: a group did not restart, or a tenant
    failed."""
    processes.check_supported()
    model = shape.save(directory / "model")
    executor: dict[str, object] = {"threads": 1, "ranks": sharding.ranks}
    executor |= {"gateways": "all"} if sharding.gateways else {}
    options = {"executor": executor, "metrics": METRICS}
    roles = session_scheme(sharding.masking).roles
    for (number, executors), what in itertools.product(enumerate(groups), losses):
        on_event(f"{executors} x {sharding.ranks} ranks: {what}")
        folder, helpers = directory / f"{number}-{what.replace(' ', '-')}", "helper" in roles
        sizes: dict[str, Any] = {"threads": 1, "executors": executors, "helpers": int(helpers)}
        local = provide(model, folder, **sizes, cache=directory / "cache", provider_options=options)
        with local, contextlib.ExitStack() as running:
            children: list[processes.Child[None, list[TimedAnswer]]] = []
            for tenant in range(sharding.tenants):
                identity = local.issue_tenant(f"tenant-{tenant}")
                where = local.federation, local.model, local.cache
                child = processes.Child(f"tenant {tenant}", serve_requests, *where, identity, sharding)
                children.append(running.enter_context(child))
            for child in children:
                child.wait_ready()
            loss = _lose(local, what, sharding, apart=sharding.apart and executors > 1 and not sharding.gateways)
            for child in children:
                child.send(None)
            answers = [answer for child in children for answer in child.receive(timeout_s=PATIENCE_S)]
            yield {"lost": what, "groups": executors, **_row(loss, answers, sharding)}


def _lose(local: LocalFederation, what: str, sharding: Sharding, *, apart: bool) -> _Loss:
    """Kill or stop a rank of the executor with the most requests, and wait until the executor is ready again."""
    seconds = sharding.seconds
    executors = [name for name in local.names if name.startswith("executor")]
    earlier = {name: local.status(name) for name in executors}
    time.sleep(seconds)
    statuses = {name: local.status(name) for name in executors}
    victim = max(executors, key=lambda name: _requests(statuses[name]) - _requests(earlier[name]))
    gateway, logged = local.pid(victim), len(local.logs(victim))
    assert gateway is not None, "the provider has just answered"
    before, known = processes.resources([gateway]), processes.sessions(gateway)
    pids = {}
    for pid in processes.descendants([gateway]):
        with contextlib.suppress(OSError):
            name, _, number = Path(f"/proc/{pid}/comm").read_text().strip().partition(" ")
            if name == "rank":  # see `provider.shards.rank_group.show_rank`
                pids[int(number)] = pid
    last = max(pids)
    if apart:  # the lowest priority for the provider and for the processes that it will start
        for task in Path(f"/proc/{gateway}/task").iterdir():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(task.name), _NICE)
    at = time.monotonic()
    os.kill(pids[last], LOSSES[what])
    if sharding.gateways:
        while local.pid(victim) is not None:
            if time.monotonic() > at + PATIENCE_S:
                raise DeadlineExceededError(f"{victim} has not ended {PATIENCE_S:g} s after {what}")
            time.sleep(_LOOK_S)
        local.restart(victim)
        gateway = local.pid(victim)
        assert gateway is not None, "it was started"
    while not sharding.gateways and not (
        (now := local.status(victim))["ready"] and now["restarts"] > statuses[victim]["restarts"]
    ):
        if time.monotonic() > at + PATIENCE_S:
            raise DeadlineExceededError(f"{victim} is not back {PATIENCE_S:g} s after {what}")
        if apart:  # Linux divides cores among sessions first, and torchrun starts a session for every rank
            new = processes.sessions(gateway) - known
            for leader in new:
                processes.lower_session_priority(leader, _NICE)
            known |= new
        time.sleep(_LOOK_S)
    back = time.monotonic()
    time.sleep(seconds)
    named = re.search(rf"\brank\s*:? {last}\b", local.logs(victim)[logged:]) is not None
    left = processes.Resources(*(now - then for now, then in zip(processes.resources([gateway]), before, strict=True)))
    return _Loss(at, back, named, left)


def _row(loss: _Loss, answers: Sequence[TimedAnswer], sharding: Sharding) -> Row:
    before = [a for a in answers if loss.at - sharding.seconds <= a.asked and a.answered < loss.at]
    meanwhile = [a for a in answers if a.answered >= loss.at and a.asked < loss.back]
    if not before or not meanwhile:
        raise ProtocolError("too few answers to compare: measure for longer (--seconds)")
    usual, during = ([1000 * (a.answered - a.asked) for a in some] for some in (before, meanwhile))
    (usual_p50, usual_p99), (during_p50, during_p99) = (np.percentile(ms, [50, 99]).tolist() for ms in (usual, during))
    return {
        "ranks": sharding.ranks,
        "tenants": sharding.tenants,
        "back_after_s": loss.back - loss.at,
        "before_p50_ms": usual_p50,
        "meanwhile_p50_ms": during_p50,
        "meanwhile_over_before": during_p50 / usual_p50,
        "before_p99_ms": usual_p99,
        "meanwhile_p99_ms": during_p99,
        "longest_s": max(during) / 1000,
        "answers": len(before) + len(meanwhile),
        "wrong": sum(not a.right for a in (*before, *meanwhile)),
        "named": "yes" if loss.named else "NO",
        **{f"left_{name}": getattr(loss.left, name) for name in ("processes", "threads", "files")},
        "left_mib": loss.left.bytes / _MIB,
    }


def _requests(status: dict[str, Any]) -> int:
    return sum(tenant["counts"]["requests"] for tenant in status["tenants"])
