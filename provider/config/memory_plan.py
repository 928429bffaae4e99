"""Plans the memory of a provider before memory is taken: which data, on which device, in which type."""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from provider import logs
from provider.config.schema import MAX_BATCH_ROWS, MIB, ProviderConfig
from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.checkpoints.manifest import GroupEntry, Manifest
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.kernels import bits_per_weight
from symbiosis_priv.kernels import chip as chips

log = logs.EventLog(__name__)

_CPU = "cpu"
_CONNECTION = 640 << 10  # of TLS, and of the kinds of requests that a connection has learned (`gateway.repeated`)
_PROCESS = 400 * MIB  # Python, torch and their libraries, in each process
_WORKING = 64 * MIB  # slices of keystream, rows and products of one batch
_CONTEXT = 768 * MIB  # of CUDA, with the programs of torch, Triton and NCCL, and graphs, on each GPU
_PACKED = 2 * 3  # bytes: an entry of rows and of products as they are on the wire
_LIMBS = 8  # bytes: an entry of a row as four float16

CHUNK: Final = 256
"""Rows that are copied to a GPU at a time."""

SLOTS: Final = 2
"""Chunks of rows and products for which there is memory, page-locked and on the GPU (`products.model.Transfers`)."""

LOCKED_SLICES: Final = 8
"""Slices of keystreams that a helper keeps in page-locked memory; further ones are in ordinary memory."""

LOCKED_ENTRIES: Final = 1 << 21
"""Entries of such a slice."""

_SLOT_ENTRIES = 1 << 24


def widest(groups: Sequence[GroupEntry]) -> int:
    """Most columns of rows and products."""
    return max(max(group.columns(FORWARD)) for group in groups)


def slot_entries(widest: int, *, chunk: int = CHUNK) -> int:
    """Entries of a slot's rows, and of its products. A stack of experts is so wide that fewer rows are copied."""
    return max(widest, min(chunk * widest, _SLOT_ENTRIES))


@dataclass(frozen=True)
class Need:
    """Memory for one purpose. `place` is "cpu", or a torch device."""

    what: str
    place: str
    kind: str
    size: int


def memory_plan(config: ProviderConfig, manifest: Manifest, served: range) -> list[Need]:
    """All memory on this machine that grows with the model or with a limit, over all processes of the provider. A
    tenant without a request needs no memory. The weights of the layer groups `served` are loaded."""
    device = config.executor.device
    groups = manifest.groups[served.start : served.stop]
    bits = bits_per_weight(manifest.weight_bits, device)
    sizes = [bits * group.inputs * group.stacked_outputs // 8 for group in groups]
    kind = f"int{bits}"
    ranks = config.executor.ranks  # processes that hold weights
    processes = 1 if ranks == 1 and not config.executor.own_process else ranks + 1
    places = [f"cuda:{rank}" for rank in range(ranks)] if device == "cuda" and ranks > 1 else [device]
    plan = [
        *(Need("ring weights, both directions", p, kind, sum(sizes) // len(places)) for p in places),
        Need("matrices in flight", _CPU, "int32 and float32", config.limits.max_inflight_mib * MIB),
        Need("connections", _CPU, "-", _CONNECTION * config.limits.max_connections),
        Need("one batch", _CPU, "int32", _WORKING * ranks),
        Need("Python and torch", _CPU, "-", _PROCESS * processes),
    ]
    if ranks > 1:
        gathered = 2 * max(sizes) * ranks // len(places)  # FSDP gathers in a buffer, and copies
        shared = 8 * slot_entries(widest(groups))
        plan.insert(-1, Need("rows and products that ranks share", _CPU, "int32", shared))
        plan[1:1] = [Need("a layer group, gathered by each rank", place, kind, gathered) for place in places]
    if device != _CPU:
        entries, slots = slot_entries(widest(groups)), 2 * SLOTS
        near = (slots * 4 + _PACKED + _LIMBS) * entries
        if ranks > 1:  # all rows and products of a batch
            near = (2 * 4 + _LIMBS) * MAX_BATCH_ROWS * widest(groups)
        else:
            rounded = 1 << (4 * entries - 1).bit_length()  # torch locks powers of two
            locked = slots * rounded + ("helper" in config.roles) * LOCKED_SLICES * 4 * LOCKED_ENTRIES
            plan.insert(-1, Need("page-locked rows and products", _CPU, "int32", locked))
        plan[1:1] = [Need("rows and products", place, "int32", near) for place in places]
        plan[1:1] = [Need("CUDA", place, "-", _CONTEXT) for place in places]
    if config.executor.float_memory is not None:
        plan.insert(1, Need("float weights", places[0], "float32", config.executor.float_memory))
    return plan


def check_plan(plan: list[Need], *, multiplies: bool) -> None:
    """Log the plan, and compare it with the available memory. If this process itself `multiplies`, on one GPU, what
    other programs use there is not available. Raises `ConfigError`: a place has too little memory; the message states
    the sizes."""
    needed: defaultdict[str, int] = defaultdict(int)
    for need in plan:
        needed[need.place] += need.size
        log.info("memory_plan", what=need.what, place=need.place, kind=need.kind, mib=-(-need.size // MIB))
    for place, size in needed.items():
        limit = _available(place, multiplies)
        if limit is not None and size > limit:
            parts = ", ".join(f"{n.what} {-(-n.size // MIB):,} MiB" for n in plan if n.place == place)
            raise ConfigError(
                f"this provider needs {-(-size // MIB):,} MiB on {place}, of {limit // MIB:,} MiB available ({parts}): "
                f"lower max_inflight_mib or float_memory_mib, choose weight_bits = 8, serve fewer "
                f"layers (`layers` under [model]), or use a larger machine"
            )


def _available(place: str, multiplies: bool) -> int | None:
    """Bytes that this process could use at a place; None if the system does not report them."""
    if place != _CPU:
        device = torch.device(place)
        if (chip := chips.chip_of(device)) is None:
            return None
        # to ask what is free takes half a GiB of each GPU; here this is part of the plan
        return min(chip.memory, chips.free_memory(device) + _CONTEXT) if multiplies else chip.memory
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _container_limit()]
    return min(limit for limit in limits if limit is not None)


def _container_limit() -> int | None:
    """The memory limit of the control group (version 2), or None."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
