"""Plans the memory of a provider before memory is taken: which data, on which device, in which type."""

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from provider import logs
from provider.config.schema import INPROC, MIB, ProviderConfig
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.kernels import bits_per_weight

log = logs.EventLog(__name__)

_CPU = "cpu"
_CONNECTION = 640 << 10  # of TLS, and of the kinds of requests that a connection has learned (`gateway.repeated`)
_PROCESS = 400 * MIB  # Python, torch and their libraries, in each process
_WORKING = 64 * MIB  # slices of keystream, rows and products of one batch


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
    bits = bits_per_weight(manifest.weight_bits, device, kernel=config.executor.kernel)
    sizes = [bits * group.inputs * group.stacked_outputs // 8 for group in groups]
    kind = f"int{bits}"
    here = ranks = config.executor.ranks  # processes that hold weights: on this machine, and in all
    processes = 1 if ranks == 1 and config.executor.endpoint == INPROC else ranks + 1
    if dist.is_initialized():  # this process is rank 0 of a group over several machines, and serves itself
        here = processes = int(os.environ["LOCAL_WORLD_SIZE"])
        ranks = dist.get_world_size()
    own_gpus = device == "cuda" and (ranks > 1 or dist.is_initialized())  # each rank has its own
    places = [f"cuda:{rank}" for rank in range(here)] if own_gpus else [device]
    plan = [
        *(Need("ring weights, both directions", p, kind, sum(sizes) * here // ranks // len(places)) for p in places),
        Need("matrices in flight", _CPU, "int32 and float32", config.limits.max_inflight_mib * MIB),
        Need("connections", _CPU, "-", _CONNECTION * config.limits.max_connections),
        Need("one batch", _CPU, "int32", _WORKING * here),
        Need("Python and torch", _CPU, "-", _PROCESS * processes),
    ]
    if config.relay.helpers:
        plan.insert(-2, Need("blocks of relayed effects", _CPU, "int32 or packed", config.relay.memory_mib * MIB))
    if ranks > 1:
        gathered = max(sizes) * here // len(places)
        plan[1:1] = [Need("a layer group, gathered by each rank", place, kind, gathered) for place in places]
    if config.executor.float_memory is not None:
        plan.insert(1, Need("float weights", places[0], "float32", config.executor.float_memory))
    return plan


def check_plan(plan: list[Need]) -> None:
    """Log the plan, and compare it with the available memory. Raises `ConfigError`: a place has too little memory; the
    message states the sizes."""
    needed: defaultdict[str, int] = defaultdict(int)
    for need in plan:
        needed[need.place] += need.size
        log.info("memory_plan", what=need.what, place=need.place, kind=need.kind, mib=-(-need.size // MIB))
    for place, size in needed.items():
        limit = _available(place)
        if limit is not None and size > limit:
            parts = ", ".join(f"{n.what} {-(-n.size // MIB):,} MiB" for n in plan if n.place == place)
            raise ConfigError(
                f"this provider needs {-(-size // MIB):,} MiB on {place}, of {limit // MIB:,} MiB available ({parts}): "
                f"lower max_inflight_mib or float_memory_mib, choose weight_bits = 8, serve fewer "
                f"layers (`layers` under [model]), or use a larger machine"
            )


def _available(place: str) -> int | None:
    """Bytes that this process could use at a place; None if the system does not report them."""
    if place != _CPU:
        usable = place.startswith("cuda") and torch.cuda.is_available()
        # memory that other processes have taken does not count as available
        return torch.cuda.mem_get_info(torch.device(place))[0] if usable else None
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _container_limit()]
    return min(limit for limit in limits if limit is not None)


def _container_limit() -> int | None:
    """The memory limit of the control group (version 2), or None."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
