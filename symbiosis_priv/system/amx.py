"""AMX, the matrix units of some x86 processors: Linux is asked to permit them, and oneDNN, which computes torch's
products on CPUs, is kept from them where its use of them fails.

Linux lets a process use AMX after `arch_prctl(ARCH_REQ_XCOMP_PERM)`. The permission is of the whole process, is kept
over fork and lost at exec. It is refused (ENOSPC) if a thread has a signal stack that is too small for the tiles, so it
is asked for once, when the package is imported and few threads exist. A process without it uses AVX-512.

A virtual machine may announce AMX and lack CPUID leaf 0x1D, which describes the tiles. oneDNN then configures no tiles,
and the first bfloat16 product of torch ends the process with SIGILL. oneDNN reads `ONEDNN_MAX_CPU_ISA` at the first
float32 or bfloat16 product of the process, so importing this project before that product is early enough, also after
`import torch`. Child processes inherit the variable. The compiled library (native/amx.h) does not need the leaf.
"""

import contextlib
import logging
import os
import sys
from pathlib import Path

log = logging.getLogger(__name__)

_CPUINFO = Path("/proc/cpuinfo")
_TILE_LEAF = 0x1D
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA = 158, 0x1023, 18  # the system call on x86-64, and its arguments


def prepare() -> None:
    """Ask for AMX, and limit oneDNN if it would trap. Does nothing on a processor that does not announce AMX."""
    facts = {}  # what Linux says of the first processor
    with contextlib.suppress(OSError), _CPUINFO.open(encoding="utf-8", errors="replace") as lines:
        for name, colon, value in (line.partition(":") for line in lines):
            if not colon:
                break
            facts[name.strip()] = value.strip()
    flags = facts.get("flags", "").split()
    if "amx_tile" in flags:
        if "amx_int8" in flags:
            _ask()
        _limit_onednn(facts.get("cpuid level", ""))


def succeeds_in_child(script: str, *arguments: str, seconds: float) -> bool:
    """Returns True if a Python script, which may trap, ends normally and in time in a new process."""
    import subprocess  # rarely needed, and slow to import

    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", script, *arguments],  # -P: imports nothing from the current folder
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _ask() -> None:
    """Ask Linux to permit AMX in this process. The compiled library looks up whether it is permitted."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(*map(ctypes.c_long, (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA))):
        log.info("AMX is not used: Linux does not permit it (%s)", os.strerror(ctypes.get_errno()))


def _limit_onednn(level: str) -> None:
    """Set `ONEDNN_MAX_CPU_ISA`, unless the user has, or the highest leaf of CPUID, `level`, is that of AMX or above."""
    if "ONEDNN_MAX_CPU_ISA" in os.environ or "DNNL_MAX_CPU_ISA" in os.environ:
        return
    if level.isdecimal() and int(level) >= _TILE_LEAF:
        return
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    log.warning(
        "this machine announces AMX without describing its tiles (CPUID leaf 0x1D), and torch's bfloat16 products would"
        " end with an illegal instruction: torch computes without AMX (ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16)"
    )
