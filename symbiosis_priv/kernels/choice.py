"""Every kernel by name, the self-test that a kernel must pass, and the choice between kernels.

Every kernel computes the same residues, so the choice affects speed only. It is a rule about facts of the machine: a
processor's instructions, a GPU's architecture (`chip`), and the number of rows. Kernels that fail the self-test are
left out.
"""

import functools
import itertools
import logging
import math
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.kernels import chip as chips
from symbiosis_priv.kernels.kernel import CompiledKernel, Kernel, Packed, PlainKernel
from symbiosis_priv.kernels.triton_kernel import TritonKernel
from symbiosis_priv.limits import RingBits
from symbiosis_priv.native import Isa, vectorised

log = logging.getLogger(__name__)

# AMX after the best of the others, which is faster for few rows
_COMPILED: tuple[Kernel, ...] = tuple(map(CompiledKernel, sorted(Isa, key=lambda isa: (isa is Isa.AMX, -isa))))
_TRITON = TritonKernel(floats=False), TritonKernel(floats=True)
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (*_COMPILED, *_TRITON, PlainKernel())}
"""Every kernel by name."""

_RING_BITS: tuple[RingBits, ...] = get_args(RingBits)
# larger than one block of every kernel, and a multiple of no block size
_TEST_SHAPE, _TEST_ROWS = (133, 515), (1, 75)
_DEEP = (9, 1030)  # more terms than `triton-fp16` adds in float32
_LOWEST_LIMBS, _HIGHEST_LIMBS = 0x7F7F7F80, 0x7F7F7F7F  # the balanced limbs of 8 bits are all -128, or 127


def bits_per_weight(weight_bits: int, device: str) -> int:
    """The bits that a packed weight probably takes on a device, which may not exist. Tests no kernel."""
    where = torch.device(device)
    if where.type == "cpu":
        kernel = "native-portable" if vectorised() else "plain"
    else:
        kernel = "plain" if chips.chip_of(where) and not _TRITON[0].supports(where) else "triton-int8"
    dtype, shape = KERNELS[kernel].form(128, 128, weight_bits=weight_bits)
    return math.prod(shape) * dtype.itemsize * 8 // (128 * 128)


def candidates(device: torch.device) -> list[Kernel]:
    """The kernels that run on a device. Those that may be the fastest come first: the probably fastest one on a GPU;
    on a CPU, the first of one layout is the fastest for few rows, and the last for many. The others follow, for a GPU
    whose compiler fails, and for experts between which no faster layout can be cut."""
    found = [kernel for kernel in KERNELS.values() if kernel.supports(device)]
    return sorted(found, key=lambda kernel: not kernel.is_candidate(device))


@functools.cache
def passes_self_test(kernel: Kernel, device: torch.device, weight_bits: int) -> bool:
    """Returns True if enough programs of a kernel pass `self_test`, once per process (`Kernel.admit`). Logs why a
    program is left out."""

    def passes(program: Kernel) -> bool:
        try:
            exact = self_test(program, device, weight_bits)
        except Exception as error:  # not built for this device or torch version, or no compiler for Triton's code
            reason = f"cannot run on {device}: {type(error).__qualname__}: {error}"
        else:
            reason = "is not exact on this machine"
            if exact and program.name == "plain" and device.type != "cpu":
                log.warning("products on %s take float64: no kernel for its matrix units runs, or no Triton", device)
            if exact:
                return True
        log.warning("kernel %s %s, and is left out", program.name, reason)
        return False

    return kernel.admit(passes, device, weight_bits)


def self_test(kernel: Kernel, device: torch.device, weight_bits: int) -> bool:
    """Returns True if a kernel is exact on a small matrix, and for sums that are as large as they can be. Starts every
    program that products of such weights use, so that none is compiled later. Raises the kernel's own errors."""
    top = (1 << (weight_bits - 1)) - 1
    weight = (probe_rows(*_TEST_SHAPE) % (2 * top + 1) - top).to(torch.int16)
    packed = kernel.pack(weight, weight_bits=weight_bits).to(device)
    for direction, count, ring_bits in itertools.product(DIRECTIONS, _TEST_ROWS, _RING_BITS):
        rows = probe_rows(count, packed.columns(direction)[0])
        if not is_exact(kernel, weight, packed, rows, direction=direction, ring_bits=ring_bits):
            return False
    for direction, shape in zip(DIRECTIONS, (_DEEP, _DEEP[::-1]), strict=True):
        weight = torch.full(shape, top, dtype=torch.int16, device="cpu")
        packed = kernel.pack(weight, weight_bits=weight_bits).to(device)
        rows = torch.full((_TEST_ROWS[-1], _DEEP[1]), _LOWEST_LIMBS, dtype=torch.int32, device="cpu")
        rows[::2] = _HIGHEST_LIMBS
        rows[::2, ::3] -= 0x01010101  # 126: odd sums and even ones, which need all bits that float32 has
        if not all(is_exact(kernel, weight, packed, some, direction=direction) for some in (rows, rows[:1])):
            return False
    return True


def is_exact(
    kernel: Kernel, weight: Tensor, packed: Packed, rows: Tensor, *, direction: Direction, ring_bits: RingBits = 32
) -> bool:
    """Returns True if a kernel's product of int32 rows on the CPU agrees with int64, which wraps modulo 2^64, in its
    low `ring_bits` bits.

    Up to 64 columns are compared, spread over the whole matrix, including the first and the last. The weight is int16
    `[o, d]` on the CPU; `packed` is the same weight in this kernel's layout, on the device to try.
    """
    matrix = weight.t() if direction == FORWARD else weight
    columns = matrix.shape[1]
    sample = torch.linspace(0, columns - 1, min(columns, 64), dtype=torch.float64, device="cpu").long().unique()
    want = (rows.to(torch.int64) @ matrix[:, sample].to(torch.int64)).to(torch.int32)
    out = torch.empty((len(rows), columns), dtype=torch.int32, device=packed.data.device)
    kernel.product(packed, rows.to(out.device), direction, out, ring_bits=ring_bits)
    return not ((out.cpu()[:, sample] ^ want) << (32 - ring_bits)).any()


def probe_rows(count: int, width: int) -> Tensor:
    """Public test rows, int32 `[count, width]`: the extremes of int32, alternating signs, every byte pattern."""
    mixed = torch.arange(count * width, dtype=torch.int64, device="cpu").reshape(count, width) * 0x9E3779B1 + 0x7F4A7C15
    rows = mixed.to(torch.int32)  # the multiplication wraps: a Weyl sequence over the whole ring
    rows[0, ::2] = -(1 << 31)
    rows[-1, 1::2] = (1 << 31) - 1
    return rows


class Choice(NamedTuple):
    """The kernels of one layout for up to 8 rows, for up to 16, and for more. AMX is faster than AVX-512 from about 6
    rows on with 8 weight bits, and from 12 to 16 rows on with 10."""

    few: Kernel
    some: Kernel
    many: Kernel

    def kernel(self, count: int) -> Kernel:
        """The kernel for products of `count` rows."""
        return self.few if count <= 8 else self.some if count <= 16 else self.many


def choose(*, weight_bits: int, device: torch.device, height: int = 0) -> Choice:
    """The kernels that are probably fastest. `height` is the number of outputs that are multiplied alone, such as those
    of one expert (`Kernel.cut`); 0 if only whole matrices are multiplied. Tests few kernels, because self-tests delay
    the start of a process. Raises `ConfigError`: no kernel is exact on this device."""
    found = [kernel for kernel in candidates(device) if height % kernel.granule == 0]
    few = next((kernel for kernel in found if passes_self_test(kernel, device, weight_bits)), None)
    if few is None:
        raise ConfigError(f"no kernel gives exact products on {device}; use device = 'cpu'")
    if device.type != "cpu":
        return Choice(few, few, few)
    alike = [kernel for kernel in found if kernel.layout == few.layout and kernel.is_candidate(device)]
    many = next((kernel for kernel in reversed(alike) if passes_self_test(kernel, device, weight_bits)), few)
    return Choice(few, few if weight_bits > 8 else many, many)
