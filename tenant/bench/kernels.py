"""Times exact products against float32 products, by kernel, instruction set, shape, row count and direction.

Every repetition measures each product once, so that other work on the machine affects all products alike.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.kernels import KERNELS, Kernel, Packed, RingMatrix, is_exact, probe_rows
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS
from tenant.bench.results.result_file import Row

log = logging.getLogger(__name__)

_SLOW_S = 0.5  # a product that takes longer is measured once


def measure_kernels(
    *,
    inputs: int,
    outputs: int,
    row_counts: list[int],
    repeat: int,
    weight_bits: int = DEFAULT_WEIGHT_BITS,
    device: str = "cpu",
) -> Iterator[Row]:
    """Time every exact kernel on one shape, in both directions, by turns.

    Yields:
        A row per direction, row count and kernel. Kernels that are not exact or do not run on this machine are missing.

    Raises:
        ConfigError: the device does not exist.
    """
    where = _device(device)
    top = (1 << (weight_bits - 1)) - 1
    weight = torch.randint(-top, top + 1, (outputs, inputs), dtype=torch.int16, device="cpu")
    kernels = {name: kernel for name, kernel in KERNELS.items() if kernel.supports(where)}
    kernels = {name: kernel for name, kernel in kernels.items() if max(weight.shape) <= kernel.max_terms()}
    packed: dict[str, Packed] = {}
    for kernel in kernels.values():
        if kernel.layout not in packed:
            packed[kernel.layout] = kernel.pack(weight, weight_bits=weight_bits).to(where)
    matrix = RingMatrix(weight, weight_bits=weight_bits, device=device)
    weight_float = weight.to(where, torch.float32)
    for direction in DIRECTIONS:
        width, columns = matrix.columns(direction)
        for count in row_counts:
            rows = probe_rows(count, width).to(where)
            out = torch.empty((count, columns), dtype=torch.int32, device=where)
            floats = (rows.to(torch.float32), weight_float.t() if direction == FORWARD else weight_float)
            runs: dict[str, Callable[[], object]] = {
                "float32": partial(torch.mm, *floats, out=out.to(torch.float32)),
                **{
                    name: partial(kernel.product, packed[kernel.layout], rows, direction, out)
                    for name, kernel in kernels.items()
                    if _is_exact(kernel, weight, packed[kernel.layout], count, direction)
                },
            }
            times = _median_us(runs, repeat=repeat, device=where)
            float32, chosen = times.pop("float32"), matrix.chosen(count, direction).name
            for name, micros in times.items():
                yield {
                    "weight_bits": weight_bits,
                    "inputs": inputs,
                    "outputs": outputs,
                    "direction": direction,
                    "rows": count,
                    "kernel": name,
                    "chosen": "yes" if name == chosen else "",
                    "product_us": micros,
                    "over_float32": micros / float32,
                }


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name, dtype=torch.int32).device
    except (RuntimeError, AssertionError) as error:  # `AssertionError` if torch was built without CUDA
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ConfigError(f"there is no device {name!r} here; there are {', '.join(['cpu', *cuda])}") from error


def _is_exact(kernel: Kernel, weight: Tensor, packed: Packed, count: int, direction: Direction) -> bool:
    try:
        return is_exact(kernel, weight, packed, count=count, direction=direction)
    except Exception as error:  # the kernel does not support this device; Triton's errors have no common base class
        log.warning(
            "kernel %s cannot run on %s: %s: %s", kernel.name, packed.data.device, type(error).__qualname__, error
        )
        return False


def _median_us(runs: dict[str, Callable[[], object]], *, repeat: int, device: torch.device) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    # CPU time, because it excludes the time of other processes; it counts only one thread
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    names = list(runs)
    order = random.Random(0)
    for _ in range(1 + repeat):
        order.shuffle(names)  # kernels share packed weights: shuffling changes which kernel finds them in the cache
        for name in names:
            if times[name] and times[name][0] > _SLOW_S:
                continue
            start = clock()
            runs[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[name].append(clock() - start)
    return {name: float(np.median(seconds[1:] or seconds) * 1e6) for name, seconds in times.items()}
