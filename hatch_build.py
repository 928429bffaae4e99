"""Build hook: compiles symbiosis_priv/native into a shared library beside its loader, where there is a C compiler.

The library is plain C behind ctypes: it knows neither Python's nor torch's ABI, so a wheel fits every Python 3 of its
platform. Without a compiler, or when compiling fails, installing goes on and torch does the work instead.

`python hatch_build.py` compiles it in place, also where hatchling is not installed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:
    BuildHookInterface = object  # type: ignore[assignment,misc]

FOLDER = Path("symbiosis_priv/native")
LIBRARY = FOLDER / "libring.so"
# Rounding is part of the results, whatever CFLAGS say: nothing contracts into fused multiply-adds, nothing reorders.
# `-fno-fast-math` leaves the single options of CFLAGS as they are, and `-funsafe-math-optimizations` links code that
# makes the loading thread flush subnormal numbers.
EXACT = [
    *("-ffp-contract=off", "-fno-fast-math", "-fno-unsafe-math-optimizations", "-fno-associative-math"),
    *("-fno-reciprocal-math", "-fno-finite-math-only", "-fsigned-zeros", "-fwrapv"),
]


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before every wheel and every editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        (root / LIBRARY).unlink(missing_ok=True)
        if not compile_library(root, warn=self.app.display_warning):
            return
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def compile_library(root: Path, *, warn: Callable[[str], object]) -> bool:
    """Compile the library in a source tree; returns False, after a warning, if that cannot be done."""
    sources = sorted((root / FOLDER).glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    command = [
        *shlex.split(os.environ.get("CC", "cc")),
        *shlex.split(os.environ.get("CFLAGS", "")),
        *("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", *EXACT),
        f'-DSOURCE_DIGEST="{digest}"',
        *("-o", str(root / LIBRARY), str(root / FOLDER / "ring.c"), "-lm"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        warn(f"no C compiler ({error}): symbiosis-priv will compute with torch alone, slower")
        return False
    if done.returncode:
        (root / LIBRARY).unlink(missing_ok=True)
        warn(f"native library left out, {command[0]} failed:\n{done.stderr}")
        return False
    return True


if __name__ == "__main__":
    compile_library(Path(__file__).parent, warn=print)
