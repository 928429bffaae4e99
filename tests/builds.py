"""Runs the same computation with torch alone, with every instruction set of the compiled library, with the library
compiled in another way, and with one kernel."""

import runpy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from symbiosis_priv import native
from symbiosis_priv.kernels import KERNELS, choice

TORCH = "torch"
BUILDS = (TORCH, *(isa.name.lower() for isa in native.isas()))


@contextmanager
def build(name: str) -> Iterator[None]:
    """Compute with one of `BUILDS` inside this block."""
    with switched(**{"SYMBIOSIS_PRIV_NATIVE": "0"} if name == TORCH else {"SYMBIOSIS_PRIV_ISA": name}):
        yield


@contextmanager
def switched(**variables: str) -> Iterator[None]:
    """Set these environment variables inside this block."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            native.switches.cache_clear()
            yield
    finally:
        native.switches.cache_clear()


@contextmanager
def only(kernel: str) -> Iterator[None]:
    """Multiply with this kernel inside this block, or with `plain` where its layout cannot be cut; with the usual one
    if it is "auto"."""
    with pytest.MonkeyPatch.context() as patch:
        if kernel != "auto":
            patch.setattr(choice, "candidates", lambda device: [KERNELS[kernel], KERNELS["plain"]])
        yield


def compiled(folder: Path, *, flags: str, compiler: str = "cc") -> Path:
    """Compile the library of this checkout in a folder, with more compiler flags. Skips the test without a compiler."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    sources = shutil.copytree(native._FOLDER, folder / "symbiosis_priv" / "native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", compiler)
        patch.setenv("CFLAGS", flags)
        build = runpy.run_path(str(Path(__file__).parents[1] / "hatch_build.py"))["compile_library"]
        assert build(folder, warn=print)
    return sources / "libring.so"


def use_library(patch: pytest.MonkeyPatch, library: Path) -> None:
    """Load this library in place of the checkout's."""
    patch.setattr(native, "_LIBRARY", library)
    loaded, with_gil = native._load.__wrapped__(), native.brief_library.__wrapped__()
    assert loaded is not None
    patch.setattr(native, "_load", lambda: loaded)
    patch.setattr(native, "brief_library", lambda: with_gil)
