"""Runs the same computation with torch alone and with every instruction set of the compiled library."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from symbiosis_priv import native

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
