"""Keeps oneDNN, which computes torch's products on CPUs, from AMX on machines where its use of AMX fails.

A virtual machine may announce AMX and lack CPUID leaf 0x1D, which describes the tiles. oneDNN then configures no tiles,
and the first bfloat16 product of torch ends the process with SIGILL. oneDNN reads `ONEDNN_MAX_CPU_ISA` at the first
float32 or bfloat16 product of the process, so importing this project before that product is early enough, also after
`import torch`. Child processes inherit the variable.
"""

import contextlib
import logging
import os
import sys
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_TILE_LEAF = 0x1D
_PROBE = "import torch; a = torch.ones(64, 512, dtype=torch.bfloat16); a @ a.t()"
_PROBE_SECONDS = 60


def limit_onednn() -> None:
    """Set `ONEDNN_MAX_CPU_ISA` if oneDNN would use AMX and trap. A variable that the user has set stays."""
    if "ONEDNN_MAX_CPU_ISA" in os.environ or "DNNL_MAX_CPU_ISA" in os.environ:
        return
    facts = {}  # what Linux says of the first processor
    with contextlib.suppress(OSError), _CPUINFO.open(encoding="utf-8", errors="replace") as lines:
        for name, colon, value in (line.partition(":") for line in lines):
            if not colon:
                break
            facts[name.strip()] = value.strip()
    if "amx_tile" not in facts.get("flags", "").split():
        return
    level = facts.get("cpuid level", "")  # the highest leaf of CPUID
    if level.isdecimal() and int(level) >= _TILE_LEAF:
        return
    if not level.isdecimal() and _product_works():
        os.environ["ONEDNN_MAX_CPU_ISA"] = "DEFAULT"  # no limit; children need not probe again
        return
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    logging.getLogger(__name__).warning(
        "this machine announces AMX without describing its tiles (CPUID leaf 0x1D), and torch's bfloat16 products would"
        " end with an illegal instruction: torch computes without AMX (ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16)"
    )


def _product_works() -> bool:
    """Returns True if a bfloat16 product in a new process ends normally."""
    import subprocess  # rarely needed, and slow to import

    command, quiet = [sys.executable, "-c", _PROBE], subprocess.DEVNULL
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=_PROBE_SECONDS, check=True)
        return True
    return False
