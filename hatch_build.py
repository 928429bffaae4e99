"""Build hook: compiles symbiosis_priv/native into a shared library beside its loader, where there is a C compiler.

The library is plain C behind ctypes: it knows neither Python's nor torch's ABI, so a wheel fits every Python 3 of its
platform. Without a compiler, or when compiling fails, installing goes on and torch does the work instead.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("symbiosis_priv/native")
LIBRARY = FOLDER / "libring.so"
# Rounding is part of the results, whatever CFLAGS say: nothing contracts into fused multiply-adds, nothing reorders.
EXACT = ["-ffp-contract=off", "-fno-fast-math", "-fwrapv"]


class NativeBuildHook(BuildHookInterface):
    """Runs before every wheel and every editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        (root / LIBRARY).unlink(missing_ok=True)
        if not self._compile(root):
            return
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def _compile(self, root: Path) -> bool:
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
            self.app.display_warning(f"no C compiler ({error}): symbiosis-priv will compute with torch alone, slower")
            return False
        if done.returncode:
            (root / LIBRARY).unlink(missing_ok=True)
            self.app.display_warning(f"native kernels left out, {command[0]} failed:\n{done.stderr}")
            return False
        return True
