"""The same computation by torch alone and by every instruction set of the compiled library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from symbiosis_priv import native

TORCH = "torch"
BUILDS = (TORCH, *(isa.name.lower() for isa in native.isas()))


@contextmanager
def build(name: str) -> Iterator[None]:
    """Compute with one of `BUILDS` while this lasts."""
    with switched(**{"SYMBIOSIS_PRIV_NATIVE": "0"} if name == TORCH else {"SYMBIOSIS_PRIV_ISA": name}):
        yield


@contextmanager
def switched(**variables: str) -> Iterator[None]:
    """With these environment variables while this lasts."""
    try:
        with mock.patch.dict(os.environ, variables):
            native.switches.cache_clear()
            yield
    finally:
        native.switches.cache_clear()
