"""`python -m symbiosis_priv.start MODULE ...`: as `python -m MODULE ...`, with less time for what is no garbage.

Python looks for garbage after every 700 new objects, and once more when it ends. Importing torch, transformers and peft
makes a million that stay until then: without this, a third of such a process' start and end is spent on them.
"""

from __future__ import annotations

import atexit
import gc
import runpy
import sys

__all__ = ["collect_rarely", "command"]

_NEW_OBJECTS = 50_000  # some MB; what is part of no cycle goes at once all the same


def collect_rarely() -> None:
    """Have this process look for garbage rarely, and at its end not once more: its memory goes with it."""
    gc.set_threshold(_NEW_OBJECTS)
    atexit.register(gc.freeze)


def command(module: str, *arguments: str) -> list[str]:
    """Of a process that runs a module."""
    return [sys.executable, "-m", __name__, module, *arguments]


def main() -> None:
    """Run the module that the command line names, as what was started."""
    collect_rarely()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
