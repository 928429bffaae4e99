"""Every kernel by name, the self-test that a kernel must pass, and the choice between kernels.

Every kernel computes the same residues, so the choice affects speed only. `choose` picks the layout of packed weights,
and the kernel of that layout for each number of rows. It never delays a tenant: it looks up a measurement, or takes the
kernel that is probably fastest among those that have passed the self-test. `tune` measures, when weights are packed for
the first time, because packing takes far longer. The results are stored on disk by machine and shape class. They do not
depend on the number of threads: the process that packs weights may have another number than the one that multiplies.
"""

import functools
import itertools
import logging
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import msgspec
import torch
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.kernels.kernel import CompiledKernel, Float64Kernel, Int32Kernel, Kernel, LimbKernel, Packed
from symbiosis_priv.kernels.triton_kernel import TritonKernel
from symbiosis_priv.limits import RingBits
from symbiosis_priv.native import Isa, vectorised
from symbiosis_priv.system.files import UNDECODABLE, read_limited, write_atomically

log = logging.getLogger(__name__)

# AMX after the best of the others, which is faster for few rows
_COMPILED: tuple[Kernel, ...] = tuple(map(CompiledKernel, sorted(Isa, key=lambda isa: (isa is Isa.AMX, -isa))))
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (*_COMPILED, Int32Kernel(), TritonKernel(), LimbKernel(), Float64Kernel())
}
"""Every kernel by name: the values of `[executor] kernel` in provider.toml, besides "auto"."""

_RING_BITS: tuple[RingBits, ...] = get_args(RingBits)
# larger than one block of every kernel, and a multiple of no block size
_TEST_SHAPE, _TEST_ROWS = (133, 515), (1, 9, 66)


def kernel_of(layout: str) -> Kernel:
    return next(kernel for kernel in KERNELS.values() if kernel.layout == layout)


def bits_per_weight(weight_bits: int, device: str, *, kernel: str = "auto") -> int:
    """The bits that a packed weight probably takes on a device, which may not exist. Tests no kernel."""
    if kernel == "auto":
        kernel = "native-portable" if device == "cpu" and vectorised() else "fp64"
    dtype, shape = KERNELS[kernel].form(64, 64, weight_bits=weight_bits)
    return math.prod(shape) * dtype.itemsize * 8 // (64 * 64)


def candidates(
    device: torch.device, *, kernel: str = "auto", fits: Callable[[Kernel], bool] = lambda _: True
) -> Iterator[Kernel]:
    """Yield the kernels that pass the self-test on a device and may be the fastest there, the probably fastest first;
    or the one that `kernel` names. Among kernels of one layout, the first is probably the fastest for few rows and the
    last for many. A kernel is tested when it is due, and only if it `fits`, because self-tests delay the start of a
    process. Raises `ConfigError`: `kernel` is unknown."""
    if kernel != "auto" and kernel not in KERNELS:
        raise ConfigError(f"kernel = {kernel!r} is unknown; choose auto, {', '.join(KERNELS)}")
    considered = KERNELS.values() if kernel == "auto" else [KERNELS[kernel]]
    found = [k for k in considered if k.supports(device) and (k.name == kernel or k.is_candidate(device))]
    return (k for k in found if fits(k) and passes_self_test(k, device))


@functools.cache
def passes_self_test(kernel: Kernel, device: torch.device) -> bool:
    """Returns True if `self_test` does, once per process. Logs why a kernel is left out."""
    try:
        exact = self_test(kernel, device)
    except Exception as error:  # not built for this device or torch version, or no compiler for Triton's code
        log.warning(
            "kernel %s cannot run on %s and is left out: %s: %s", kernel.name, device, type(error).__qualname__, error
        )
        return False
    if not exact:
        log.warning("kernel %s is not exact on this machine and is left out", kernel.name)
    return exact


def self_test(kernel: Kernel, device: torch.device) -> bool:
    """Returns True if a kernel is exact on a small matrix of each packed width. Raises the kernel's own errors."""
    for weight_bits in (8, 10, 12):
        top = (1 << (weight_bits - 1)) - 1
        weight = (probe_rows(*_TEST_SHAPE) % (2 * top + 1) - top).to(torch.int16)
        packed = kernel.pack(weight, weight_bits=weight_bits).to(device)
        for direction, count, ring_bits in itertools.product(DIRECTIONS, _TEST_ROWS, _RING_BITS):
            if not is_exact(kernel, weight, packed, count=count, direction=direction, ring_bits=ring_bits):
                return False
    return True


def is_exact(
    kernel: Kernel, weight: Tensor, packed: Packed, *, count: int, direction: Direction, ring_bits: RingBits = 32
) -> bool:
    """Returns True if a kernel's product of `count` rows agrees with int64, which wraps modulo 2^64, in its low
    `ring_bits` bits.

    Up to 64 columns are compared, spread over the whole matrix, including the first and the last. The weight is int16
    `[o, d]` on the CPU; `packed` is the same weight in this kernel's layout, on the device to try.
    """
    matrix = weight.t() if direction == FORWARD else weight
    width, columns = matrix.shape
    sample = torch.linspace(0, columns - 1, min(columns, 64), dtype=torch.float64, device="cpu").long().unique()
    rows = probe_rows(count, width)
    want = (rows.to(torch.int64) @ matrix[:, sample].to(torch.int64)).to(torch.int32)
    out = torch.empty((count, columns), dtype=torch.int32, device=packed.data.device)
    kernel.product(packed, rows.to(out.device), direction, out, ring_bits=ring_bits)
    return not ((out.cpu()[:, sample] ^ want) << (32 - ring_bits)).any()


def probe_rows(count: int, width: int) -> Tensor:
    """Public test rows, int32 `[count, width]`: the extremes of int32, alternating signs, every byte pattern."""
    mixed = torch.arange(count * width, dtype=torch.int64, device="cpu").reshape(count, width) * 0x9E3779B1 + 0x7F4A7C15
    rows = mixed.to(torch.int32)  # the multiplication wraps: a Weyl sequence over the whole ring
    rows[0, ::2] = -(1 << 31)
    rows[-1, 1::2] = (1 << 31) - 1
    return rows


ROW_CLASSES = {"few": 4, "some": 12, "many": 64}
"""The classes of row counts (`row_class`), and the count that represents each in a timing."""
_CLASSES = {f"{direction} {rows}" for direction in DIRECTIONS for rows in ROW_CLASSES}
# size of the sample of a matrix that is timed; it gives work to all processors
_TIMED_WEIGHTS = {"cpu": 1 << 22, "cuda": 1 << 26}
_MAX_CHOICES = 16 << 20  # limit of the file of results, in bytes
_REPEATS = 3


class Choice(msgspec.Struct, frozen=True):
    """A layout, and the name of the kernel for each "direction class", for example "forward few"."""

    layout: str
    kernels: dict[str, str]

    def kernel(self, direction: Direction, count: int) -> Kernel:
        return self.of_class(direction, row_class(count))

    def of_class(self, direction: Direction, rows: str) -> Kernel:
        return KERNELS[self.kernels[f"{direction} {rows}"]]


def row_class(count: int) -> str:
    """The class of a number of rows. AMX is faster than AVX-512 from about 6 rows on with 8 weight bits, and from 12 to
    16 rows on with 10."""
    return "few" if count <= 8 else "some" if count <= 16 else "many"


def choose(
    shape: Sequence[int],
    *,
    weight_bits: int,
    device: torch.device,
    kernel: str = "auto",
    shardable: bool = False,
    height: int = 0,
    results: Path | None = None,
) -> Choice:
    """The choice for a matrix: the fastest one in the measurement of `tune`, else the one that is probably fastest.

    Args:
        shape: (outputs, inputs).
        kernel: "auto", or a name in `KERNELS`.
        shardable: with "auto", choose only layouts that can be split by output channel.
        height: number of outputs that are multiplied alone, such as those of one expert (`Kernel.cut`); 0 if only the
            whole matrix is multiplied.
        results: the file that `tune` writes.

    Raises:
        ConfigError: a kernel that is unknown, does not run here, or is not exact for this shape.
    """
    exact = functools.partial(_exact_for, shape, device, kernel, shardable=shardable, height=height)
    if kernel == "auto" and results is not None:
        stored = _read_results(results).get(_shape_class(shape, weight_bits, device, shardable=shardable))
        if stored and stored.kernels.keys() == _CLASSES:
            usable = {k.name for k in exact(layout=stored.layout)}
            if usable.issuperset(stored.kernels.values()):
                return stored
    first = next(exact())
    *_, last = exact(layout=first.layout)
    some = first if device.type == "cpu" and weight_bits > 8 else last
    names = {"few": first.name, "some": some.name, "many": last.name}
    return Choice(first.layout, {f"{direction} {rows}": names[rows] for direction in DIRECTIONS for rows in names})


def tune(
    weight: Tensor, *, weight_bits: int, device: torch.device, shardable: bool = False, height: int = 0, results: Path
) -> None:
    """Time the candidates for `choose` on a sample of a weight, int16 `[o, d]` on the CPU, and store the fastest in the
    file of results. Does nothing if there is a result, or if all candidates share a layout: `choose` knows their order,
    and a timing in a phase in which AMX is slow would be kept for good."""
    key = _shape_class(weight.shape, weight_bits, device, shardable=shardable)
    if key in _read_results(results):
        return
    found = list(_exact_for(weight.shape, device, "auto", shardable=shardable, height=height))
    if len({kernel.layout for kernel in found}) == 1:
        return
    timed = _TIMED_WEIGHTS["cuda" if device.type == "cuda" else "cpu"]
    sample = weight[: max(1, timed // weight.shape[1])]
    times: dict[str, dict[str, dict[str, float]]] = {}  # seconds by layout, by "direction class", by kernel
    for kernel in found:
        packed = kernel.pack(sample, weight_bits=weight_bits).to(device)
        for direction in DIRECTIONS:
            for rows, count in ROW_CLASSES.items():
                seconds = _seconds(kernel, sample, packed, count, direction=direction)
                times.setdefault(kernel.layout, {}).setdefault(f"{direction} {rows}", {})[kernel.name] = seconds
    best = {
        layout: {c: min(t.items(), key=lambda item: item[1]) for c, t in by.items()} for layout, by in times.items()
    }
    layout = min(best, key=lambda name: math.prod(seconds for _, seconds in best[name].values()))
    choice = Choice(layout, {row_class: name for row_class, (name, _) in best[layout].items()})
    log.info("kernels for %s: %s", key, choice)
    write_atomically(results, msgspec.json.encode(_read_results(results) | {key: choice}))


def _exact_for(
    shape: Sequence[int], device: torch.device, kernel: str, *, shardable: bool, height: int, layout: str | None = None
) -> Iterator[Kernel]:
    """Yield the exact kernels for a matrix, the probably fastest first; or those of `layout`, of which there may be
    none. Raises `ConfigError` if no kernel is exact."""

    def fits(k: Kernel) -> bool:
        shards = k.shard_granule is not None or not shardable or kernel != "auto"
        return layout in (None, k.layout) and max(shape) <= k.max_terms() and shards and height % k.granule == 0

    found = candidates(device, kernel=kernel, fits=fits)
    first = next(found, None)
    if first is None and (height if kernel == "auto" else height % KERNELS[kernel].granule):
        # some layouts cannot be cut at every expert; the unchanged weights can
        cut_anywhere = "int32" if device.type == "cpu" else "fp64"
        found = candidates(device, kernel=cut_anywhere, fits=lambda k: layout in (None, k.layout))
        first = next(found, None)
    if first is not None:
        yield first
        yield from found
    elif layout is None:
        raise ConfigError(
            f"kernel = {kernel!r} gives no exact product of a layer of {list(shape)} on {device}; use kernel = 'auto' "
            f"or device = 'cpu'"
        )


def _seconds(kernel: Kernel, weight: Tensor, packed: Packed, count: int, *, direction: Direction) -> float:
    """The best time of a few runs; infinite if the kernel is not exact for this shape."""
    if not is_exact(kernel, weight, packed, count=count, direction=direction):
        log.warning("kernel %s is not exact for %s on this machine and is left out", kernel.name, list(weight.shape))
        return math.inf
    device = packed.data.device
    width, columns = packed.columns(direction)
    rows = probe_rows(count, width).to(device)
    out = torch.empty((count, columns), dtype=torch.int32, device=device)
    seconds = []
    for _ in range(_REPEATS):
        if device.type == "cuda":  # empty the L2 cache (50 MB on an H100): in a model it holds other layers
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
            torch.empty(size, dtype=torch.uint8, device=device).zero_()
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        kernel.product(packed, rows, direction, out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _read_results(results: Path) -> dict[str, Choice]:
    try:
        return msgspec.json.decode(read_limited(results, _MAX_CHOICES), type=dict[str, Choice])
    except (OSError, *UNDECODABLE):  # missing or damaged: it will be measured again
        return {}


def _shape_class(shape: Sequence[int], weight_bits: int, device: torch.device, *, shardable: bool = False) -> str:
    """A key for shapes of similar speed: each dimension rounded to a power of two."""
    outputs, inputs = (round(math.log2(max(1, size))) for size in shape)
    return f"{_machine(device)}, 2^{outputs}x2^{inputs}, {weight_bits} bits{', shardable' * shardable}"


@functools.cache
def _machine(device: torch.device) -> str:
    processor = platform.processor() or platform.machine()
    cpus = Path("/proc/cpuinfo")
    if cpus.is_file():
        lines = cpus.read_text(encoding="utf-8", errors="replace").split("\n")
        processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), processor)
    if device.type == "cuda":
        processor += " " + torch.cuda.get_device_name(device)
    return f"{processor}, torch {torch.__version__}, {native.source_digest()[:12]}"
