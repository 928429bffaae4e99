"""`bench ranks`: measures how a killed or hanging rank of a sharded executor affects tenants.

Each tenant is a process with its own session. The tenant requests one product after the other and compares each answer
with its own product. A rank of the busiest group is killed (SIGKILL) or stopped (SIGSTOP). The provider must detect the
loss, name the rank, and restart the group. With one group, all tenants wait for the restart; with two groups, they can
use the other group. In practice a second group has its own machine. So the restarting group has low priority here,
unless `apart` is False, and its restart takes longer.
"""

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from symbiosis_priv.errors import DeadlineExceededError, ProtocolError
from symbiosis_priv.harness.local import METRICS, LocalFederation
from tenant.bench.measured_models import Llama
from tenant.bench.processes import process_costs
from tenant.bench.processes.children import Child
from tenant.bench.processes.process_costs import Resources
from tenant.bench.processes.providers import provide
from tenant.bench.results.result_file import Row
from tenant.masking.registry import session_scheme
from threat_model.availability.options import Sharding
from threat_model.availability.request_loop import PATIENCE_S, TimedAnswer, serve_requests

LOSSES: Final = {"a rank is killed": signal.SIGKILL, "a rank hangs": signal.SIGSTOP}
"""What happens to a rank, and by which signal."""

_LOOK_S = 0.1
_NICE = 19
_MIB = 1 << 20


@dataclass(frozen=True)
class _Loss:
    """The loss of a rank and the restart of its group.

    Args:
        at, back: times at which the group lost the rank and at which the group was ready again.
        named: True if the provider's log names the rank.
        before, after: resources of the provider and its ranks.
    """

    what: str
    at: float
    back: float
    named: bool
    before: Resources
    after: Resources


def measure_ranks(
    directory: Path,
    shape: Llama,
    sharding: Sharding,
    *,
    groups: Sequence[int],
    losses: Collection[str] = LOSSES.keys(),
    on_event: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """A row for each number of groups and each loss.

    Args:
        sharding: the executors, and the tenants that send requests to them.

    Raises:
        DeadlineExceededError: a group did not restart in time.
        SymbiosisError: a tenant has failed.
    """
    process_costs.check_supported()
    model = shape.save(directory / "model")
    options: dict[str, dict[str, object]] = {"executor": {"threads": 1, "ranks": sharding.ranks}, "metrics": METRICS}
    for (number, executors), what in itertools.product(enumerate(groups), losses):
        on_event(f"{executors} x {sharding.ranks} ranks: {what}")
        local = provide(
            model,
            directory / f"{number}-{what.replace(' ', '-')}",
            threads=1,
            executors=executors,
            helpers=int("helper" in session_scheme(sharding.masking).roles),
            cache=directory / "cache",
            provider_options=options,
        )
        with local, contextlib.ExitStack() as running:
            children: list[Child[None, list[TimedAnswer]]] = []
            for tenant in range(sharding.tenants):
                identity = local.issue_tenant(f"tenant-{tenant}")
                where = local.federation, local.model, local.cache
                child = Child(f"tenant {tenant}", serve_requests, *where, identity, sharding)
                children.append(running.enter_context(child))
            for child in children:
                child.wait_ready()
            loss = _lose(local, what, seconds=sharding.seconds, apart=sharding.apart and executors > 1)
            for child in children:
                child.send(None)
            answers = [answer for child in children for answer in child.receive(timeout_s=PATIENCE_S)]
            yield _row(loss, answers, sharding, executors=executors)


def _lose(local: LocalFederation, what: str, *, seconds: float, apart: bool) -> _Loss:
    """Kill or stop a rank of the executor with the most requests, and wait until the executor is ready again."""
    executors = [name for name in local.names if name.startswith("executor")]
    earlier = {name: local.status(name) for name in executors}
    time.sleep(seconds)
    statuses = {name: local.status(name) for name in executors}
    victim = max(executors, key=lambda name: _requests(statuses[name]) - _requests(earlier[name]))
    gateway, logged = local.pid(victim), len(local.logs(victim))
    assert gateway is not None, "the provider has just answered"
    before, ranks, sessions = process_costs.resources([gateway]), _ranks(gateway), process_costs.sessions(gateway)
    last = max(ranks)
    if apart:
        _lower_priority(gateway)
    at = time.monotonic()
    os.kill(ranks[last], LOSSES[what])
    while not ((now := local.status(victim))["ready"] and now["restarts"] > statuses[victim]["restarts"]):
        if time.monotonic() > at + PATIENCE_S:
            raise DeadlineExceededError(f"{victim} is not back {PATIENCE_S:g} s after {what}")
        if apart:  # Linux divides cores among sessions first, and torchrun starts a session for every rank
            new = process_costs.sessions(gateway) - sessions
            for leader in new:
                process_costs.lower_session_priority(leader, _NICE)
            sessions |= new
        time.sleep(_LOOK_S)
    back = time.monotonic()
    time.sleep(seconds)
    named = re.search(rf"\brank\s*:? {last}\b", local.logs(victim)[logged:]) is not None
    return _Loss(what, at, back, named, before, process_costs.resources([gateway]))


def _row(loss: _Loss, answers: Sequence[TimedAnswer], sharding: Sharding, *, executors: int) -> Row:
    before = [a for a in answers if loss.at - sharding.seconds <= a.asked and a.answered < loss.at]
    meanwhile = [a for a in answers if a.answered >= loss.at and a.asked < loss.back]
    if not before or not meanwhile:
        raise ProtocolError("too few answers to compare: measure for longer (--seconds)")
    usual, during = ([1000 * (a.answered - a.asked) for a in some] for some in (before, meanwhile))
    (usual_p50, usual_p99), (during_p50, during_p99) = (np.percentile(ms, [50, 99]).tolist() for ms in (usual, during))
    left = Resources(*(now - then for now, then in zip(loss.after, loss.before, strict=True)))
    return {
        "lost": loss.what,
        "groups": executors,
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
        "left_processes": left.processes,
        "left_threads": left.threads,
        "left_files": left.files,
        "left_mib": left.bytes / _MIB,
    }


def _requests(status: dict[str, Any]) -> int:
    return sum(tenant["counts"]["requests"] for tenant in status["tenants"])


def _lower_priority(gateway: int) -> None:
    """Give the lowest priority to a provider and to the processes that it will start."""
    for task in Path(f"/proc/{gateway}/task").iterdir():
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(task.name), _NICE)


def _ranks(gateway: int) -> dict[int, int]:
    """The process id of each rank."""
    found = {}
    for pid in process_costs.descendants([gateway]):
        with contextlib.suppress(OSError):
            name, _, number = Path(f"/proc/{pid}/comm").read_text().strip().partition(" ")
            if name == "rank":  # see `provider.shards.torchrun.show_rank`
                found[int(number)] = pid
    return found
