"""A group of ranks: how they connect, notice a rank that hangs, and end together.

**Rendezvous.** Ranks on one machine use a folder that no other user can enter; no port is opened. Ranks on several
machines use the store of torchrun's first machine (MASTER_ADDR, MASTER_PORT), which does not authenticate.

**Heartbeats.** Each rank increments a counter, and other ranks watch the counter. An error of a collective does not
name the missing rank, and a collective that waits raises no error before the group's timeout. A process that was killed
or stopped has no heartbeat; a process that waits in a collective has one. Rank 0 watches all other ranks, and the other
ranks watch rank 0. A group in which one rank has stopped therefore ends within seconds. A rank is lost if its counter
does not change during ten beats of the watching rank. Beats are counted instead of seconds, so that a machine that was
suspended does not lose a rank.

**End.** A rank ends when torchrun ends, and can kill torchrun with all ranks of the machine. The process id of torchrun
comes from the kernel, never from another rank.
"""

import atexit
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from symbiosis_priv.system.pacing import Periodic

_BEAT_S = 0.5
_MISSED = 10  # beats of the watching rank without a beat of the watched rank
_PATIENCE_S = 3.0  # `absent` waits this long for a beat of every rank
_LEAD = 0


class Counters(Protocol):
    """Numbers that all ranks can read (`counters`)."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter that starts at 0, and return the sum. OSError or RuntimeError if the store is gone."""


class Heartbeats:
    """Sends the heartbeat of this rank, and watches other ranks. `lost` is called once, in the heartbeat's thread, with
    the ranks whose heartbeat has stopped; with an empty list if the counters cannot be reached any more."""

    def __init__(self, *, rank: int, world: int, counters: Counters, lost: Callable[[list[int]], None]) -> None:
        self._rank, self._world, self._counters, self._lost = rank, world, counters, lost
        self._watched = [other for other in range(world) if other != rank and _LEAD in (other, rank)]
        self._heard, self._missed = dict.fromkeys(self._watched, 0), dict.fromkeys(self._watched, 0)
        self._beats(rank, 1)
        self._periodic = Periodic(self._beat, every_s=_BEAT_S, name="heartbeat")
        self._periodic.start()
        atexit.register(self.close)  # also when an error ends the process

    def absent(self) -> list[int]:
        """Ranks without a heartbeat. Takes three seconds. Empty if the counters cannot be reached."""
        ranks = range(self._world)
        try:
            before = [self._beats(rank) for rank in ranks]
            time.sleep(_PATIENCE_S)
            return [rank for rank in ranks if self._beats(rank) == before[rank]]
        except (RuntimeError, OSError):  # the store has gone with the group
            return []

    def close(self) -> None:
        """Stop the thread. Python aborts a process that ends while one of its threads is inside torch."""
        self._periodic.close(_PATIENCE_S)

    def _beat(self) -> None:
        try:
            self._beats(self._rank, 1)
            for rank in self._watched:
                before, self._heard[rank] = self._heard[rank], self._beats(rank)
                silent = 0 < self._heard[rank] == before  # a rank without a first beat is still starting
                self._missed[rank] = self._missed[rank] + 1 if silent else 0
        except (RuntimeError, OSError):
            absent = []
        else:
            absent = [rank for rank in self._watched if self._missed[rank] >= _MISSED]
            if not absent:
                return
        if not self._periodic.stopped:
            self._periodic.stop()
            self._lost(absent)

    def _beats(self, rank: int, more: int = 0) -> int:
        return self._counters.add(f"beats/{rank}", more)


FOLDER_VARIABLE: Final = "SYMBIOSIS_PRIV_RANKS_FOLDER"
"""The environment variable that names the folder, for ranks on one machine. `launch` makes one folder per group."""

_COUNTER_BYTES = 8
_TIMEOUT = timedelta(seconds=30)


def join(device: str, *, timeout: timedelta) -> None:
    """Call `init_process_group` for the group that torchrun's variables and `FOLDER_VARIABLE` describe: with NCCL on
    GPUs, where "cuda" is the GPU with the rank's number on its machine. Raises `RuntimeError`: not all ranks joined the
    group in time."""
    folder = os.environ.get(FOLDER_VARIABLE)
    own: torch.device | None = None
    if device.startswith("cuda"):
        own = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device)
        torch.cuda.set_device(own)
    backend = "nccl" if own else "gloo"
    if folder is None:
        dist.init_process_group(backend, timeout=timeout, device_id=own)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = FileStore(f"{folder}/store", world)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=own)


def counters() -> Counters:
    """Make counters that all ranks of the group share."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        return FileCounters(Path(folder))
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
    return PrefixStore(f"symbiosis-priv/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)


class FileCounters:
    """One file per counter. Only one process may add to a counter. (A `FileStore` grows with every addition.)"""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, key: str, amount: int, /) -> int:
        file = os.open(self._folder / key.replace("/", "-"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            total = int.from_bytes(os.pread(file, _COUNTER_BYTES, 0), "big") + amount
            if amount:
                os.pwrite(file, total.to_bytes(_COUNTER_BYTES, "big"), 0)
        finally:
            os.close(file)
        return total


_PR_SET_PDEATHSIG = 1
_INIT = 1
_parent: int | None = None  # process id of torchrun, once the kernel ends this process with it


def limit_memory(room: int) -> None:
    """Limit the memory of this process, a torchrun, to `room` bytes more than it uses now. A client that floods the
    store can then end torchrun, but cannot fill the machine's memory. The ranks inherit the limit and lift it. Does
    nothing on systems without /proc."""
    status = Path("/proc/self/status")
    if status.is_file():
        used = 1024 * int(status.read_text().partition("VmData:")[2].split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + room, hard))


def end_with_torchrun() -> None:
    """Have the kernel kill this process when torchrun ends (Linux), and lift torchrun's limit on memory. Otherwise a
    rank that hangs would not notice the end, and would keep its memory and its address. On other systems, only ranks
    that do not hang end with the group."""
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


def kill_torchrun() -> None:
    """Kill torchrun, and so all ranks of this machine. torchrun itself waits half a minute for a stopped rank. Does
    nothing if `end_with_torchrun` was not called, because the ranks would then continue without torchrun."""
    if _parent is None or _parent <= _INIT:
        return
    process = os.pidfd_open(_parent)  # refers to the process itself: process ids are reused
    if os.getppid() == _parent:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    os.close(process)
