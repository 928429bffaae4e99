"""`bench ranks`: what tenants notice when a rank of a sharded executor is killed, or hangs.

Tenants, each a process with a session of its own, ask for one product after the other without a pause, and compare
every one with their own. A rank of the group that is asked most is killed (SIGKILL) or stopped (SIGSTOP); the provider
has to notice, say who is missing, and start the group again. Once there is this group alone, so that everybody waits
for its return, and once there is a second one to go to. A second group would have a machine of its own: so the one that
has lost a rank then comes back with little priority, unless told otherwise, and takes longer.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from symbiosis_priv.errors import DeadlineExceededError, ProtocolError
from symbiosis_priv.harness.local import LocalFederation
from tenant.bench import processes
from tenant.bench.contest import START_S, Shape
from tenant.bench.report import Row
from tenant.bench.status import METRICS, status_of
from tenant.masking.registry import session_scheme
from threat_model.availability.asking import Answer, asking

LOSSES: Final = {"a rank is killed": signal.SIGKILL, "a rank hangs": signal.SIGSTOP}
"""What happens, and by which signal."""

_PATIENCE_S = 120.0
_LOOK_S = 0.1
_NICE = 19
_MIB = 1 << 20


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
    pause_s: float = 0.0,
    apart: bool = True,
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
        pause_s: of a tenant between two products, which leaves its machine to the group that starts again.
        apart: where there is another group, let the one that was lost start again with little priority.
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
        with local, asking(local, tenants=tenants, rows=rows, masking=masking, pause_s=pause_s) as collect:
            loss = _lose(local, what, seconds=seconds, apart=apart and executors > 1)
            found.append(_row(loss, collect(), seconds=seconds, executors=executors, ranks=ranks, tenants=tenants))
    return found


def _lose(local: LocalFederation, what: str, *, seconds: float, apart: bool) -> _Loss:
    """Take a rank from the executor that is asked most, and wait until it has got over it."""
    executors = [name for name in local.names if name.startswith("executor")]
    earlier = {name: status_of(local, name) for name in executors}
    time.sleep(seconds)
    statuses = {name: status_of(local, name) for name in executors}
    victim = max(executors, key=lambda name: _requests(statuses[name]) - _requests(earlier[name]))
    gateway, said = local.pid(victim), len(local.logs(victim))
    assert gateway is not None, "it has just answered"
    before, ranks, sessions = _held(gateway), _ranks(gateway), processes.sessions(gateway)
    last = max(ranks)
    if apart:
        _give_way(gateway)
    at = time.monotonic()
    os.kill(ranks[last], LOSSES[what])
    while not ((now := status_of(local, victim))["ready"] and now["restarts"] > statuses[victim]["restarts"]):
        if time.monotonic() > at + _PATIENCE_S:
            raise DeadlineExceededError(f"{victim} is not back {_PATIENCE_S:g} s after {what}")
        if apart:  # Linux shares cores out among sessions first, and torchrun gives every rank one
            new = processes.sessions(gateway) - sessions
            for leader in new:
                processes.push_back(leader, _NICE)
            sessions |= new
        time.sleep(_LOOK_S)
    back = time.monotonic()
    time.sleep(seconds)
    named = re.search(rf"\brank\s*:? {last}\b", local.logs(victim)[said:]) is not None
    return _Loss(what, at, back, named, before, _held(gateway))


def _row(loss: _Loss, answers: Sequence[Answer], *, seconds: float, executors: int, ranks: int, tenants: int) -> Row:
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
