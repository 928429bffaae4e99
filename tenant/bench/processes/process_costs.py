"""Reads processor time and memory of processes from /proc, and lowers the priority of processes."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from symbiosis_priv.errors import ConfigError

_PROC = Path("/proc")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_KIB_PER_MIB = 1024


class Resources(NamedTuple):
    """Resources of some processes at one moment: number of processes, threads, open files and resident bytes."""

    processes: int
    threads: int
    files: int
    bytes: int


def check_supported() -> None:
    """Refuse a system without /proc.

    Raises:
        ConfigError: this is not Linux.
    """
    if not (_PROC / "self" / "stat").exists():
        raise ConfigError("this benchmark reads other processes' costs from /proc; run it on Linux")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the user and system time of processes and their living descendants."""
    return sum(sum(map(int, _stat(pid)[11:13])) * _TICK_S for pid in descendants(pids))


def peak_mib(pids: Iterable[int]) -> float:
    """Return the sum of the peak resident memory of each process and living descendant, in MiB."""
    return sum(_peak_kib(pid) for pid in descendants(pids)) / _KIB_PER_MIB


def resources(pids: Iterable[int]) -> Resources:
    """Return the resources of processes and their living descendants."""
    members = descendants(pids)
    threads = files = pages = 0
    for pid in members:
        with contextlib.suppress(OSError):
            folder = _PROC / str(pid)
            pages += int((folder / "statm").read_text().split()[1])
            threads += len(list((folder / "task").iterdir()))
            files += len(list((folder / "fd").iterdir()))
    return Resources(len(members), threads, files, pages * os.sysconf("SC_PAGE_SIZE"))


def descendants(pids: Iterable[int]) -> set[int]:
    """Return the ids of processes and their living descendants."""
    parents = {int(path.name): int(stat[1]) for path in _PROC.glob("[0-9]*") if (stat := _stat(int(path.name)))}
    found = {pid for pid in pids if pid in parents}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def lower_own_priority(nice: int) -> None:
    """Lower the priority of this process and its children, so that they use only CPU time that other processes leave.

    Linux divides cores among sessions first, and within a session by priority (`autogroup` in sched(7)). A priority has
    no effect on processes of other sessions, so this process starts its own session.
    """
    os.setsid()
    os.nice(nice)
    lower_session_priority(os.getpid(), nice)


def lower_session_priority(pid: int, nice: int) -> None:
    """Lower the priority of a process's session, so that it uses only CPU time that other sessions leave.

    Args:
        nice: the session's priority, 1 to 19.
    """
    with contextlib.suppress(OSError):  # the system has no autogroups, or the process has ended
        (_PROC / str(pid) / "autogroup").write_text(str(nice))


def sessions(pid: int) -> set[int]:
    """Return the sessions of a process and its living descendants."""
    return {int(stat[3]) for member in descendants([pid]) if (stat := _stat(member))}


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; an empty list if the process has ended."""
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
