"""Times exact products against float32 products, by kernel, shape, row count and direction: the section `products`.

Every repetition measures each product once, so that other work on the machine affects all products alike.
"""

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

import numpy as np
import torch

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD
from symbiosis_priv.kernels import KERNELS, Packed, RingMatrix, is_exact, probe_rows
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, RingBits
from tenant.bench.report import Row

log = logging.getLogger(__name__)

_SLOW_S = 0.5  # a product that takes longer is measured once
_RINGS: Final[tuple[RingBits, ...]] = (32, 24)
_Run = tuple[str, int]  # a kernel and the bits of a ring
_FLOAT32: Final[_Run] = ("float32", 32)


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
        A row per direction, row count, kernel and ring. Kernels that are not exact or do not run on this machine are
        missing.
    """
    where = torch.empty(0, device=device, dtype=torch.int32).device
    top = (1 << (weight_bits - 1)) - 1
    weight = torch.randint(-top, top + 1, (outputs, inputs), dtype=torch.int16, device="cpu")
    kernels = {name: kernel for name, kernel in KERNELS.items() if kernel.supports(where)}
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
            runs: dict[_Run, Callable[[], object]] = {_FLOAT32: partial(torch.mm, *floats, out=out.to(torch.float32))}
            for (name, kernel), bits in itertools.product(kernels.items(), _RINGS):
                if bits < max(_RINGS) and kernel.layout == "plain":
                    continue
                data = packed[kernel.layout]
                try:
                    if is_exact(kernel, weight, data, rows.cpu(), direction=direction, ring_bits=bits):
                        runs[name, bits] = partial(kernel.product, data, rows, direction, out, ring_bits=bits)
                except Exception as error:  # no support for this device; Triton's errors have no common base class
                    log.warning("kernel %s cannot run on %s: %s: %s", name, where, type(error).__qualname__, error)
            times = _median_us(runs, repeat=repeat, device=where)
            float32, chosen = times.pop(_FLOAT32), matrix.chosen(count).name
            for (name, ring_bits), micros in times.items():
                yield {
                    "weight_bits": weight_bits,
                    "inputs": inputs,
                    "outputs": outputs,
                    "direction": direction,
                    "rows": count,
                    "ring_bits": ring_bits,
                    "kernel": name,
                    "chosen": "yes" if name == chosen else "",
                    "product_us": micros,
                    "float32_us": float32,
                    "over_float32": micros / float32,
                }


def _median_us(runs: Mapping[_Run, Callable[[], object]], *, repeat: int, device: torch.device) -> dict[_Run, float]:
    times: dict[_Run, list[float]] = {name: [] for name in runs}
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
