"""`bench start`: times the work before the first request: a provider's start, and the tenant's verification keys.

Reading the checkpoint is measured too, as the lower bound of both. If the system can drop a file from its cache, every
measurement reads the checkpoint from the disk.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from symbiosis_priv.checkpoints.weights import WeightStore
from tenant.bench.measured_models import Llama, Repeat, provide
from tenant.bench.options import Progress, benchmark
from tenant.bench.report import Goal, Row, by, figure
from tenant.core.blame import DEFAULT_COLUMNS
from tenant.preparation.keys import prepare

_START_S = 3600.0
_PIECE = 1 << 24  # bytes read at a time
_SHARD = "128MB"
_BYTES = 2  # bytes of a weight in bfloat16
_BILLION = Llama(width=2048, layers=16, inner=8192)


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    found = by(rows, "what")
    if (warm := found.get("provider, warm cache")) is not None:
        yield Goal("seconds to a provider with a warm cache", figure(warm, "wall_s"), at_most=2)
    if (keys := found.get("tenant, verification keys")) is not None:
        yield Goal("verification keys over reading", figure(keys, "over_reading"), at_most=3)


@benchmark("start", goals=goals)
def start(
    folder: Path,
    progress: Progress,
    *,
    shape: Llama = _BILLION,
    repeat: Repeat = 3,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads of a provider, and for making keys.")] = (
        os.cpu_count() or 1
    ),
) -> Iterator[Row]:
    """Time a provider's start, cold and warm, the tenant's verification keys, and reading the checkpoint.

    Writes a checkpoint of the given shape (a billion weights, 2 GB) and up to 2 bytes per weight of cache; both are
    deleted.

    Example: symbiosis-priv bench start --width 1024 --layers 8 --inner 4096
    """
    progress("writing a checkpoint")
    model = folder / "model"
    shape.save(model, dtype=torch.bfloat16, shard=_SHARD)
    torch.set_num_threads(threads)
    seconds: dict[str, list[float]] = {}
    own_cpu: dict[str, list[float]] = {}  # CPU time of this process, without the providers

    def clock(what: str, work: Callable[[], object]) -> None:
        progress(what)
        begun, cpu = time.perf_counter(), time.process_time()
        work()
        seconds.setdefault(what, []).append(time.perf_counter() - begun)
        own_cpu.setdefault(what, []).append(time.process_time() - cpu)

    local = provide(model, folder, threads=threads, helpers=0, deadline_s=_START_S)
    clock("provider, first start", local.start)
    try:
        digest = WeightStore(model, cache=folder / "federation" / "cache").manifest().digest
        for turn in range(repeat):
            local.kill("executor")
            clock("provider, warm cache", lambda: local.restart("executor"))
            forget(model)
            clock("read the checkpoint", lambda: read(model))
            forget(model)
            cache = folder / f"keys-{turn}"
            keys = partial(prepare, digest=digest, columns=DEFAULT_COLUMNS, cache=cache)
            clock("tenant, verification keys", partial(keys, WeightStore(model, cache=cache)))
            clock("tenant, keys at hand", partial(keys, None))
    finally:
        local.stop()
    reading = statistics.median(seconds["read the checkpoint"])
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    for what, times in seconds.items():
        yield {
            "million_weights": round(size / _BYTES / 1e6),
            "checkpoint_mib": round(size / 2**20),
            "threads": threads,
            "what": what,
            "wall_s": statistics.median(times),
            "own_cpu_s": None if what.startswith("provider") else statistics.median(own_cpu[what]),
            "over_reading": statistics.median(times) / reading,
        }


def read(model: Path) -> None:
    """Read every byte of a checkpoint's tensors into memory."""
    piece = bytearray(_PIECE)
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass


def forget(model: Path) -> None:
    """Ask the system to drop its cache of a checkpoint, if possible."""
    if not hasattr(os, "posix_fadvise"):
        return
    os.sync()
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
