"""`bench kernels`: times exact products against float32 products, by kernel, shape, row count and direction.

Every repetition measures each product once, so that other work on the machine affects all products alike.
"""

import itertools
import logging
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import torch
import typer

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.kernels import KERNELS, Packed, RingMatrix, is_exact, probe_rows
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS, RingBits
from tenant.bench.measured_models import HALF_THE_CORES, Repeat
from tenant.bench.options import Progress, Rows, Threads, benchmark, numbers
from tenant.bench.report import Goal, Row, by, figure, where

log = logging.getLogger(__name__)

_SLOW_S = 0.5  # a product that takes longer is measured once
_RINGS: Final[tuple[RingBits, ...]] = (32, 24)
_Run = tuple[str, int]  # a kernel and the bits of a ring
_FLOAT32: Final[_Run] = ("float32", 32)
# goals for the time over float32's, with up to 8 rows and with more
_AT_MOST: Final = {"native-amx": (0.7, 0.5), "native-avx512": (0.7, 1.25)}


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    chosen = [row for row in rows if row["chosen"]]
    for name in by(chosen, "kernel"):
        for few, at_most in zip((True, False), _AT_MOST.get(str(name), (2.2, 2.2)), strict=True):
            of_size = [row for row in where(chosen, kernel=name) if (figure(row, "rows") <= 8) == few]
            if of_size:
                what = f"{name}'s slowest product over float32's, {'up to 8 rows' if few else 'more rows'}"
                slowest = max(figure(row, "over_float32") for row in of_size)
                yield Goal(what, slowest, at_most=at_most)


@benchmark("kernels", goals=goals)
def kernels(
    folder: Path,
    progress: Progress,
    *,
    rows: Rows = "1,8,64,256",
    shape: Annotated[str, typer.Option(help="INPUTSxOUTPUTS, separated by commas.")] = "2048x2048,2048x11264",
    repeat: Repeat = 10,
    threads: Threads = HALF_THE_CORES,
    weight_bits: Annotated[str, typer.Option(help="Bits of a quantised weight, separated by commas.")] = str(
        DEFAULT_WEIGHT_BITS
    ),
    device: Annotated[str, typer.Option(help="Torch device: cpu, or cuda.")] = "cpu",
) -> Iterator[Row]:
    """Time every exact kernel and float32 in both directions, and show which kernel is chosen. Kernels that save work
    in a ring of 24 bits are timed in both rings.

    Example: symbiosis-priv bench kernels --rows 1,64 --shape 2048x2048
    """
    counts, bit_counts = numbers(rows, "--rows"), numbers(weight_bits, "--weight-bits")
    if min(bit_counts) < MIN_WEIGHT_BITS or max(bit_counts) > MAX_WEIGHT_BITS:
        raise ConfigError(f"--weight-bits {weight_bits!r}: write numbers from {MIN_WEIGHT_BITS} to {MAX_WEIGHT_BITS}")
    shapes = [re.fullmatch(r"0*([1-9]\d*)x0*([1-9]\d*)", part) for part in shape.split(",")]
    if None in shapes:
        raise ConfigError(f"--shape {shape!r}: write INPUTSxOUTPUTS separated by commas, like 256x256,1024x4096")
    torch.set_num_threads(threads)
    timed = partial(measure_kernels, row_counts=counts, repeat=repeat, device=device)
    for match, bits in itertools.product(filter(None, shapes), bit_counts):
        yield from timed(inputs=int(match[1]), outputs=int(match[2]), weight_bits=bits)


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

    Raises:
        ConfigError: the device does not exist.
    """
    try:
        where = torch.empty(0, device=device, dtype=torch.int32).device
    except (RuntimeError, AssertionError) as error:  # `AssertionError` if torch was built without CUDA
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ConfigError(f"there is no device {device!r} here; there are {', '.join(['cpu', *cuda])}") from error
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
                if bits < max(_RINGS) and not kernel.narrow:
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
