"""`python -m symbiosis_priv.system.processes MODULE ...`: as `python -m MODULE ...`, and a quick end.

Python looks for garbage once more when it ends. Importing torch, transformers and peft makes a million objects, and to
go through them takes a third of such a process' start and end, though its memory goes with it anyway. Until then
garbage is looked for as usual: what is thrown away may hold a large tensor.
"""

from __future__ import annotations

import atexit
import gc
import runpy
import sys


def end_quickly() -> None:
    """Skip the last garbage collection of this process."""
    atexit.register(gc.freeze)


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a process that runs a module."""
    return [sys.executable, "-m", __name__, module, *arguments]


def main() -> None:
    """Run the module that the command line names, as what was started."""
    end_quickly()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
