"""What adversaries on the tenant's machine find: nothing, and each planted fault."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from symbiosis_priv.arithmetic.modular import PRIME
from threat_model.active.same_user import FAULT, TRIES
from threat_model.attacks.recorded_links import solve

if TYPE_CHECKING:
    from threat_model.suite import Suite

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")


def found_by(quick: Suite, adversary: str) -> dict[str, list[str]]:
    """What an adversary has found, by the planted fault."""
    labels = (trial.labels for trial in quick.trials("The tenant's machine") if trial.labels[0] == adversary)
    return {fault: found.split(", ") for _, fault, _, found in labels}


@linux
def test_another_process_reads_nothing_unless_the_tenant_stays_dumpable(quick: Suite) -> None:
    """Which ways are open to a process that stays dumpable depends on the system: its environment is, on all."""
    found = found_by(quick, "a process of its user")
    assert list(found) == ["none", FAULT]
    assert found["none"] == ["nothing"]
    assert "/proc/PID/environ: variables" in found[FAULT]
    assert {one.partition(":")[0] for one in found[FAULT]} <= set(TRIES)


@linux
def test_a_disk_image_has_no_secret_unless_one_was_left_open(quick: Suite) -> None:
    assert found_by(quick, "a disk image") == {
        "none": ["nothing"],
        "rows and an adapter are left in the cache": ["rows", "adapters"],
        "hints are in the clear": ["R"],
        "the cache has no key from outside": ["verification keys"],
    }


@pytest.mark.parametrize(("modulus", "dtype"), [(PRIME, object), (1 << 32, np.uint32)], ids=["p", "2^32"])
@given(st.integers(1, 6), st.integers(0, 2**32))
def test_equations_have_one_solution_or_none(modulus: int, dtype: Any, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, wanted = rng.integers(0, 1 << 15, (width + 2, width)), rng.integers(0, modulus, (width, 2))
    products = matrix.astype(object) @ wanted.astype(object) % modulus
    full = np.linalg.matrix_rank(matrix if modulus == PRIME else matrix % 2) == width
    found = solve(matrix.astype(dtype), products.astype(dtype), modulus)
    if modulus == PRIME or found is not None:
        assert full == (found is not None)
        assert found is None or (found == wanted).all()
    products[-1] ^= 1
    assert solve(matrix.astype(dtype), products.astype(dtype), modulus) is None
