"""Every kernel by name, the self-test that a kernel must pass, and the candidates on a device."""

import functools
import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.kernels.compiled import CompiledKernel
from symbiosis_priv.kernels.kernel import Kernel, Packed
from symbiosis_priv.kernels.limbs import LimbKernel
from symbiosis_priv.kernels.plain import Float64Kernel, Int32Kernel
from symbiosis_priv.kernels.triton_kernel import TritonKernel
from symbiosis_priv.native import Isa

log = logging.getLogger(__name__)

_ALL: tuple[Kernel, ...] = (
    *map(CompiledKernel, reversed(Isa)),
    Int32Kernel(),
    TritonKernel(),
    LimbKernel(),
    Float64Kernel(),
)
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _ALL}
"""Every kernel by name: the values of `[executor] kernel` in provider.toml, besides "auto"."""

# larger than one block of every kernel, and a multiple of no block size
_TEST_SHAPE, _TEST_ROWS = (133, 515), (1, 9, 66)


def kernel_of(layout: str) -> Kernel:
    return next(kernel for kernel in KERNELS.values() if kernel.layout == layout)


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
    """Returns True if a kernel runs here and is exact, on a small matrix of each packed width. Tests once per
    process."""
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
    return all(_is_exact_on_a_sample(kernel, weight_bits, device) for weight_bits in (8, 12))


def _is_exact_on_a_sample(kernel: Kernel, weight_bits: int, device: torch.device) -> bool:
    outputs, inputs = _TEST_SHAPE
    top = (1 << (weight_bits - 1)) - 1
    weight = (probe_rows(outputs, inputs) % (2 * top + 1) - top).to(torch.int16)
    packed = kernel.pack(weight, weight_bits=weight_bits).to(device)
    return all(
        is_exact(kernel, weight, packed, count=count, direction=direction)
        for direction in DIRECTIONS
        for count in _TEST_ROWS
    )


def is_exact(kernel: Kernel, weight: Tensor, packed: Packed, *, count: int, direction: Direction) -> bool:
    """Returns True if a kernel's product of `count` rows agrees with int64, which wraps modulo 2^64, in its low 32
    bits.

    Up to 64 columns are compared, spread over the whole matrix, including the first and the last.

    Args:
        weight: int16 `[o, d]` on the CPU.
        packed: the same weight, packed by a kernel of this layout, on the device to try.
    """
    matrix = weight.t() if direction == FORWARD else weight
    width, columns = matrix.shape
    sample = torch.linspace(0, columns - 1, min(columns, 64), dtype=torch.float64, device="cpu").long().unique()
    rows = probe_rows(count, width)
    want = (rows.to(torch.int64) @ matrix[:, sample].to(torch.int64)).to(torch.int32)
    out = torch.empty((count, columns), dtype=torch.int32, device=packed.data.device)
    kernel.product(packed, rows.to(out.device), direction, out)
    return torch.equal(out.cpu()[:, sample], want)


def probe_rows(count: int, width: int) -> Tensor:
    """Public test rows, int32 `[count, width]`: the extremes of int32, alternating signs, every byte pattern."""
    mixed = torch.arange(count * width, dtype=torch.int64, device="cpu").reshape(count, width) * 0x9E3779B1 + 0x7F4A7C15
    rows = mixed.to(torch.int32)  # the multiplication wraps: a Weyl sequence over the whole ring
    rows[0, ::2] = -(1 << 31)
    rows[-1, 1::2] = (1 << 31) - 1
    return rows
