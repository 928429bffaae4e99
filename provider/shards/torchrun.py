"""torchrun and the ranks that it has started: a rank ends with its torchrun, and can end it with all ranks beside it.

No process id comes from another rank: the kernel says which process is the parent.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_INIT = 1
_parent: int | None = None  # where the kernel ends this process with it


def limit_memory(room: int) -> None:
    """Let this process, a torchrun, allocate so many bytes more: a flood of its store can end it, and fills no machine.

    Its ranks inherit the limit and lift it. Does nothing where /proc does not say what is used.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        used = 1024 * int(status.read_text().partition("VmData:")[2].split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + room, hard))


def end_with_torchrun() -> None:
    """Have the kernel kill this process when torchrun ends (Linux), and lift torchrun's limit on memory.

    A rank that hangs would not notice otherwise, and would keep its memory and its address. Elsewhere, ranks that do
    not hang end with the group.
    """
    global _parent
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _parent = os.getppid()
    if _parent == _INIT:  # torchrun ended before the call above
        sys.exit("error: torchrun has ended")


def is_here(rank: int) -> bool:
    """Whether torchrun on this machine has started that rank."""
    first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
    return first <= rank < first + int(os.environ["LOCAL_WORLD_SIZE"])


def kill() -> None:
    """Kill torchrun, and so all ranks on this machine, this one too: torchrun waits half a minute for a stopped rank.

    Does nothing without `end_with_torchrun`, because the ranks would then go on alone.
    """
    if _parent is None or _parent <= _INIT:
        return
    process = os.pidfd_open(_parent)  # names the process, not its number, which is used again
    if os.getppid() == _parent:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    os.close(process)
