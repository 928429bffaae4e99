"""The compiled library, if the installation found a C compiler. `library()` returns it, or None.

torch can do everything that the library does, more slowly: ring arithmetic with the same bits, local functions of float
rows (local.h) with other last bits. So callers have a torch path, and choose by `library()`. ctypes releases the GIL
during a call. The instruction set is an argument of each function, so one process can compare all of them.

    SYMBIOSIS_PRIV_NATIVE=0          do not use the library
    SYMBIOSIS_PRIV_ISA=portable      (avx2, avxvnni, avx512, amx) use no instruction set above this one

After the loader come the layout of matrices that the fused passes read and write, and slices of one product on as many
threads as torch has (`torch.set_num_threads`): idle ones sleep, and take slices one by one.
"""

import ctypes
import enum
import functools
import hashlib
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.system.amx import succeeds_in_child

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_LIBRARY = _FOLDER / "libring.so"
_AMX_PROBE = "import ctypes, sys, symbiosis_priv; sys.exit(ctypes.CDLL(sys.argv[1]).ring_amx_works() != 1)"
_AMX_PROBE_SECONDS = 30


class Switches(NamedTuple):
    """Switches from the environment: whether to use the library, and the highest instruction set."""

    native: bool
    isa: str | None


@functools.cache
def switches() -> Switches:
    """The switches, read once per process; `switches.cache_clear()` makes the next call read them again."""
    return Switches(os.environ.get("SYMBIOSIS_PRIV_NATIVE") != "0", os.environ.get("SYMBIOSIS_PRIV_ISA"))


class Isa(enum.IntEnum):
    """The instruction sets with code of their own, in the order of C's `enum isa`, the best last."""

    PORTABLE = 0
    AVX2 = 1
    AVXVNNI = 2
    AVX512 = 3  # with VNNI
    AMX = 4  # for ring products; everything else takes this as AVX512


def library() -> ctypes.CDLL | None:
    """The loaded library with its functions' signatures declared; None if absent, stale or switched off."""
    return _load() if switches().native else None


@functools.cache
def brief_library() -> ctypes.PyDLL:
    """The library, called without releasing the GIL, for brief work (docs/adr/9-lane.md). Call it only if `library()`
    is not None."""
    lib = ctypes.PyDLL(str(_LIBRARY))
    _declare(lib)
    return lib


class Compiled(NamedTuple):
    """The library, and the best instruction set that CPU and switches allow."""

    library: ctypes.CDLL
    isa: int


def compiled(*, brief: bool = False) -> Compiled | None:
    """The compiled code; None as for `library`. `brief`: calls do not release the GIL, as with `brief_library`."""
    return _compiled(switches(), brief)


@functools.cache
def _compiled(switches: Switches, brief: bool) -> Compiled | None:
    lib = _load() if switches.native else None
    if lib is None:
        return None
    return Compiled(brief_library() if brief else lib, int(_usable(lib, switches.isa)[-1]))


def isas() -> tuple[Isa, ...]:
    """The instruction sets usable here, best last; empty without a library. Raises `ConfigError`: SYMBIOSIS_PRIV_ISA is
    not the name of an instruction set."""
    lib = library()
    return () if lib is None else _usable(lib, switches().isa)


def best(lib: ctypes.CDLL) -> Isa:
    """The best instruction set that the CPU and the switches allow."""
    return _usable(lib, switches().isa)[-1]


@functools.cache
def _usable(lib: ctypes.CDLL, most: str | None) -> tuple[Isa, ...]:
    if most and most.upper() not in Isa.__members__:
        raise ConfigError(f"SYMBIOSIS_PRIV_ISA={most} is unknown; choose {', '.join(Isa.__members__).lower()}")
    best, usable = Isa[most.upper()] if most else max(Isa), lib.ring_isas()
    # AMX may be an illegal instruction although the CPU announces it, so a new process computes products. It imports
    # the package, which asks for AMX, and not torch.
    announced = best is Isa.AMX and usable >> Isa.AMX & 1
    if announced and not succeeds_in_child(_AMX_PROBE, str(_LIBRARY), seconds=_AMX_PROBE_SECONDS):
        log.warning("this machine announces AMX, and its products fail: products are computed with AVX-512")
        usable &= ~(1 << Isa.AMX)
    return tuple(isa for isa in Isa if isa <= best and usable >> isa & 1)


def vectorised() -> bool:
    """Returns True if the library uses vector instructions on this CPU, and not only plain C."""
    return any(isa > Isa.PORTABLE for isa in isas())


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a CPU tensor, for a C argument; the caller keeps the tensor alive."""
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def _load() -> ctypes.CDLL | None:
    if not _LIBRARY.is_file():
        log.info("no compiled kernels: installed without a C compiler")
        return None
    kept = _keeps_subnormals()
    try:
        lib = ctypes.CDLL(str(_LIBRARY))
        lib.ring_source_digest.restype = ctypes.c_char_p
        stale = lib.ring_source_digest().decode() != source_digest()
    except (OSError, AttributeError) as error:
        log.warning("compiled kernels left out: %s does not load (%s); install symbiosis-priv again", _LIBRARY, error)
        return None
    if kept and not _keeps_subnormals():
        torch.set_flush_denormal(False)
        log.warning(
            "compiled kernels left out: loading %s makes the processor flush subnormal numbers, because its compiler "
            "or CFLAGS change floating-point arithmetic; install symbiosis-priv again without such flags",
            _LIBRARY,
        )
        return None
    if stale:
        log.warning("compiled kernels left out: %s is older than its sources; install symbiosis-priv again", _LIBRARY)
        return None
    _declare(lib)
    return lib


def _keeps_subnormals() -> bool:
    """Returns True if this thread computes with subnormal numbers, as exact results require."""
    return bool(torch.tensor(2.0**-149, dtype=torch.float32, device="cpu").mul(1.0))


_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double, "i": ctypes.c_int32, "u": ctypes.c_uint32}
_SIGNATURES = {
    "ring_isas": "->u",
    "ring_pack": "pnnip",
    "ring_split": "iiipnnp",
    "ring_product": "iiipinnpnpnn",
    "ring_answer": "iiipinnnppp",
    "ring_encode": "ipnpddppnpppnn->n",
    "ring_decode": "ippnnipppppppnn->n",
    "ring_pack24": "ipnp",
    "ring_unpack24": "ipnp",
    "ring_dot": "ipnnpp",
    "ring_weigh": "ipnnpnppp",
    "ring_quantise": "ipndppnn->n",
    "ring_norms": "ipnnpp",
    "ring_join": "pnp",
    "lattice_secrets": "ipnp",
    "lattice_noise": "ipnp",
    "lattice_gather": "iippnipnnn",
    "local_linear": "ipnnpipnnn",
    "local_attend": "ippppnn",
    "local_append": "ppnpp",
}
"""The types of arguments and result of every exported function, as in the C sources."""


def _declare(lib: ctypes.CDLL) -> None:
    for name, signature in _SIGNATURES.items():
        arguments, _, result = signature.partition("->")
        function = getattr(lib, name)
        function.argtypes, function.restype = [_TYPES[letter] for letter in arguments], _TYPES.get(result)


def source_digest() -> str:
    """SHA-256 of the sources, as hatch_build.py computes it."""
    sources = sorted(_FOLDER.glob("*.[ch]"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


FORMATS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}  # as in passes.h
_NO_MEMORY = -1  # as in passes.h
_SHARE = 1 << 18  # entries: fewer are not worth another thread


def layout(matrices: Sequence[Tensor]) -> ctypes.Array[ctypes.c_int64]:
    """The C struct `parts` of passes.h for float matrices `[r, w_k]`: column blocks on the CPU, one dtype of `FORMATS`.
    Each row of a matrix must be contiguous. The caller keeps the matrices alive."""
    fields = [FORMATS[matrices[0].dtype], len(matrices)]
    for matrix in matrices:
        fields += matrix.data_ptr(), matrix.stride(0), matrix.shape[1]
    return array_of(fields)


def readable(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Float matrices that the compiled code can read. A matrix is copied if necessary; float16 is converted to
    float32."""
    found = []
    for matrix in matrices:
        if matrix.dtype not in FORMATS or matrix.stride(1) != 1:
            matrix = matrix.detach()
            matrix = (matrix if matrix.dtype in FORMATS else matrix.to(torch.float32)).contiguous()
        found.append(matrix)
    return found


def array_of(fields: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """A C array of int64."""
    return (ctypes.c_int64 * len(fields))(*fields)


def all_rows(work: Callable[..., int], *arguments: object, rows: int, width: int) -> bool:
    """Run a function of the library over all rows, on several threads if there are many. `work` takes the arguments,
    the first row and the end row, and returns the row at which it stopped. Returns True if all succeed."""
    failed: list[int] = []

    def share(start: int, stop: int) -> None:
        reached = work(*arguments, start, stop)
        if reached == _NO_MEMORY:
            raise MemoryError
        if reached != stop:
            failed.append(start)

    for_each_slice(share, total=rows, least=max(1, _SHARE // max(1, width)))
    return not failed


_SLICES_PER_THREAD = 4

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def slices_of(*, total: int, least: int) -> int:
    """The number of slices into which `for_each_slice` divides its work."""
    threads = torch.get_num_threads()
    return 1 if threads == 1 else min(threads * _SLICES_PER_THREAD, total // least)


def for_each_slice(work: Callable[[int, int], None], *, total: int, least: int) -> None:
    """Call `work(begin, end)` on slices that cover `range(total)`, in no order, and return when all are done. A slice
    of `least` is worth another thread; only the last slice may be smaller."""
    global _pool, _pool_size
    threads, slices = torch.get_num_threads(), slices_of(total=total, least=least)
    if slices < 2:
        work(0, total)
        return
    step = -(-total // slices)
    begins = deque(range(0, total, step))

    def drain() -> None:
        while True:
            try:
                begin = begins.popleft()
            except IndexError:
                return
            work(begin, min(begin + step, total))

    if (pool := _pool) is None or _pool_size < threads - 1:
        pool, _pool_size = ThreadPoolExecutor(threads - 1, thread_name_prefix="ring"), threads - 1
        _pool = pool
    helpers = [pool.submit(drain) for _ in range(min(threads, len(begins)) - 1)]
    drain()
    for helper in helpers:
        if not helper.cancel():  # it has begun, so wait for the end of its slice
            helper.result()


def _forget() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget)  # after a fork, the child has only the calling thread


_LINEAR_BYTES = 1 << 20  # of weights: brief work


def can_multiply(rows: Tensor, weight: Tensor) -> bool:
    """Returns True if `linear` can multiply these tensors on this machine."""
    return (
        library() is not None
        and rows.is_cpu
        and weight.is_cpu
        and weight.dim() == 2
        and rows.dtype == weight.dtype
        and rows.dtype in (torch.float32, torch.bfloat16)
        and weight.is_contiguous()
    )


def linear(rows: Tensor, weight: Tensor) -> Tensor:
    """Compute `rows @ weight.T` with sums in float32: `[..., d]` and `[o, d]` to `[..., o]`, all of one dtype. The bits
    of a row do not depend on the other rows."""
    (outputs, inputs), count = weight.shape, rows.numel() // weight.shape[1]
    found = compiled(brief=outputs * inputs * count <= _SHARE)
    assert found is not None  # `can_multiply` has returned True
    lib, isa = found
    x = rows if rows.dtype is torch.float32 and rows.is_contiguous() else rows.detach().float().contiguous()
    result = torch.empty((*rows.shape[:-1], outputs), dtype=torch.float32, device="cpu")
    operands = x.data_ptr(), count, inputs, weight.data_ptr(), FORMATS[weight.dtype], result.data_ptr(), outputs

    def columns(begin: int, end: int) -> None:
        lib.local_linear(isa, *operands, begin, end)

    row_bytes = inputs * weight.element_size() * max(1, count // 8)
    for_each_slice(columns, total=outputs, least=max(1, _LINEAR_BYTES // max(1, row_bytes)))
    return result if rows.dtype is torch.float32 else result.to(rows.dtype)
