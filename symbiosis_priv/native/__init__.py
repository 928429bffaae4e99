"""The compiled library, if the installation found a C compiler. `library()` returns it, or None.

torch can do everything that the library does, more slowly: ring arithmetic with the same bits, local functions of float
rows (local.h) with other last bits. So callers have a torch path, and choose by `library()`. ctypes releases the GIL
during a call. The library has no threads of its own. The instruction set is an argument of each function, so one
process can compare all of them.

    SYMBIOSIS_PRIV_NATIVE=0          do not use the library
    SYMBIOSIS_PRIV_ISA=portable      (avx2, avxvnni, avx512) use no instruction set above this one

Both variables are read once, because looking up a variable takes as long as many calls.

Read in this order: `parallel` (slices on a few threads), `column_blocks` (matrices that the fused passes read and
write), `linear` (a float linear).
"""

import ctypes
import enum
import functools
import hashlib
import logging
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from symbiosis_priv.errors import ConfigError

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_LIBRARY = _FOLDER / "libring.so"


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


def library() -> ctypes.CDLL | None:
    """The loaded library with its functions' signatures declared; None if absent, stale or switched off."""
    return _load() if switches().native else None


def brief_library() -> ctypes.PyDLL:
    """The library, called without releasing the GIL: for work that takes less time than reacquiring the GIL.
    Call it only if `library()` is not None.
    """
    return _load_with_gil()


def isas() -> tuple[Isa, ...]:
    """The instruction sets usable here, best last; empty without a library.

    Raises:
        ConfigError: SYMBIOSIS_PRIV_ISA is not the name of an instruction set.
    """
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
    """Returns True if this thread computes with subnormal numbers, as the project's exact results require."""
    return bool(torch.tensor(2.0**-149, dtype=torch.float32, device="cpu").mul(1.0))


@functools.cache
def _load_with_gil() -> ctypes.PyDLL:
    lib = ctypes.PyDLL(str(_LIBRARY))
    _declare(lib)
    return lib


def _declare(lib: ctypes.CDLL) -> None:
    """Argument and result types of every exported function, as in the C sources."""
    address, integer, real, isa = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int32
    signatures: dict[str, tuple[tuple[object, ...], object]] = {
        "ring_isas": ((), ctypes.c_uint32),
        "ring_pack": ((address, integer, integer, ctypes.c_int32, address), None),
        "ring_split": ((address, integer, integer, address), None),
        "ring_product": (
            (isa, ctypes.c_int32, address, ctypes.c_int32, *2 * (integer,), address, integer, address, *2 * (integer,)),
            None,
        ),
        "ring_encode": ((isa, address, integer, address, real, real, *4 * (address,), *2 * (integer,)), integer),
        "ring_decode": (
            (isa, *2 * (address,), *2 * (integer,), ctypes.c_int32, *7 * (address,), *2 * (integer,)),
            integer,
        ),
        "ring_pack24": ((isa, address, integer, address), None),
        "ring_unpack24": ((isa, address, integer, address), None),
        "ring_subtract24": ((isa, address, integer, address), None),
        "ring_dot": ((isa, address, integer, integer, address, address), None),
        "ring_weigh": ((isa, address, integer, integer, address, integer, *3 * (address,)), None),
        "ring_quantise": ((isa, address, integer, real, address, address, *2 * (integer,)), integer),
        "ring_norms": ((isa, address, integer, integer, address, address), None),
        "ring_join": ((address, integer, address), None),
        "local_linear": ((isa, address, *2 * (integer,), address, isa, address, *3 * (integer,)), None),
        "local_attend": ((isa, *4 * (address,), *2 * (integer,)), None),
        "local_append": ((*2 * (address,), integer, *2 * (address,)), None),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, result


def source_digest() -> str:
    """SHA-256 of the sources, as hatch_build.py computes it."""
    sources = sorted(_FOLDER.glob("*.[ch]"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
