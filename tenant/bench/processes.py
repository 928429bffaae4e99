"""Processes of a benchmark: what they have cost so far, from /proc, with all that they have started; and how those that
have a machine of their own in earnest take no cores from the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from symbiosis_priv.errors import ConfigError

_PROC = Path("/proc")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_KIB_PER_MIB = 1024


def check_supported() -> None:
    """Refuse where there is no /proc.

    Raises:
        ConfigError: this is not Linux.
    """
    if not (_PROC / "self" / "stat").exists():
        raise ConfigError("this benchmark reads other processes' costs from /proc; run it on Linux")


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of processes and their living descendants."""
    return sum(sum(map(int, _stat(pid)[11:13])) * _TICK_S for pid in _trees(pids))


def peak_mib(pids: Iterable[int]) -> float:
    """Largest resident memory of each process and descendant so far, summed."""
    return sum(_peak_kib(pid) for pid in _trees(pids)) / _KIB_PER_MIB


def tree(pid: int) -> set[int]:
    """A process and its living descendants."""
    return _trees([pid])


def give_way(nice: int) -> None:
    """From now on this process, and what it starts, gets those cores' time that others leave.

    Linux shares cores out among sessions first and within them by processes' priorities (`autogroup` in sched(7)), so
    that the priority of a process means nothing to one of another session. This process begins a session of its own.

    Args:
        nice: its priority, 1 to 19.
    """
    os.setsid()
    os.nice(nice)
    push_back(os.getpid(), nice)


def push_back(pid: int, nice: int) -> None:
    """Have a process' whole session get what other sessions leave.

    Args:
        nice: the session's priority, 1 to 19.
    """
    with contextlib.suppress(OSError):  # a system that shares cores out among processes only, or it has ended
        (_PROC / str(pid) / "autogroup").write_text(str(nice))


def sessions(pid: int) -> set[int]:
    """Of a process and its living descendants."""
    return {int(stat[3]) for member in tree(pid) if (stat := _stat(member))}


def _trees(pids: Iterable[int]) -> set[int]:
    parents = {int(path.name): int(stat[1]) for path in _PROC.glob("[0-9]*") if (stat := _stat(int(path.name)))}
    found = {pid for pid in pids if pid in parents}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _stat(pid: int) -> list[str]:
    """The fields after the command, state first; none if the process is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _peak_kib(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
