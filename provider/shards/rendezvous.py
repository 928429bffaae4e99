"""Connects the ranks of a group, and keeps the counters of their heartbeats.

Ranks on one machine use a folder that no other user can enter; no port is opened. Ranks on several machines use the
store of torchrun's first machine (MASTER_ADDR, MASTER_PORT), which does not authenticate.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from provider.shards.heartbeats import Counters

FOLDER_VARIABLE: Final = "SYMBIOSIS_PRIV_RANKS_FOLDER"
"""The environment variable that names the folder, for ranks on one machine. `launch` makes one folder per group."""

_COUNTER_BYTES = 8
_TIMEOUT = timedelta(seconds=30)


def join(backend: str, *, timeout: timedelta) -> None:
    """Call `init_process_group` for the group that torchrun's variables and `FOLDER_VARIABLE` describe. Raises
    `RuntimeError`: not all ranks joined the group in time."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = FileStore(f"{folder}/store", world)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


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
