"""Ends ranks with their torchrun: a rank ends when torchrun ends, and can kill torchrun with all ranks of the machine.

The process id of torchrun comes from the kernel, never from another rank.
"""

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_INIT = 1
_parent: int | None = None  # process id of torchrun, once the kernel ends this process with it


def limit_memory(room: int) -> None:
    """Limit the memory of this process, a torchrun, to `room` bytes more than it uses now.

    A client that floods the store can then end torchrun, but cannot fill the machine's memory. The ranks inherit the
    limit and lift it. Does nothing on systems without /proc.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        used = 1024 * int(status.read_text().partition("VmData:")[2].split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + room, hard))


def end_with_torchrun() -> None:
    """Have the kernel kill this process when torchrun ends (Linux), and lift torchrun's limit on memory.

    Otherwise a rank that hangs would not notice the end, and would keep its memory and its address. On other systems,
    only ranks that do not hang end with the group.
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


def show_rank() -> None:
    """Name this process `rank N`, as `ps -o comm` and `top` show it (Linux)."""
    name = Path("/proc/self/comm")
    if name.is_file():
        name.write_text(f"rank {os.environ['RANK']}")


def is_here(rank: int) -> bool:
    """True if torchrun on this machine has started the rank."""
    first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
    return first <= rank < first + int(os.environ["LOCAL_WORLD_SIZE"])


def kill() -> None:
    """Kill torchrun, and so all ranks of this machine. torchrun itself waits half a minute for a stopped rank.

    Does nothing if `end_with_torchrun` was not called, because the ranks would then continue without torchrun.
    """
    if _parent is None or _parent <= _INIT:
        return
    process = os.pidfd_open(_parent)  # refers to the process itself: process ids are reused
    if os.getppid() == _parent:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    os.close(process)
