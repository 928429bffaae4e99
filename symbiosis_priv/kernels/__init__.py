"""Exact matrix products modulo 2^32, and the choice between them.

A kernel packs a weight matrix once and multiplies in both directions from that one copy, 2 bytes per weight or 1 at up
to 8 weight bits. `RingMatrix` is what products are taken of.

    native-*   compiled, by instruction set: int16 limbs, `vpdpwssd` or `pmaddwd` (compiled)
    int32      torch's integer matmul, which wraps (plain)
    fp64       float64 matmul on integers below 2^53 (plain)
    triton     int8 tensor cores of a GPU, everything in one pass (triton_kernel)
    limbs      int8 matrix units, product by product: CUDA tensor cores, AMX (limbs)
"""

from __future__ import annotations

from symbiosis_priv.kernels.base import Kernel, Packed
from symbiosis_priv.kernels.choice import Choice, choose, tune
from symbiosis_priv.kernels.matrix import RingMatrix
from symbiosis_priv.kernels.registry import KERNELS, is_exact, kernel_of, probe_rows, self_test

__all__ = [
    "KERNELS",
    "Choice",
    "Kernel",
    "Packed",
    "RingMatrix",
    "choose",
    "is_exact",
    "kernel_of",
    "probe_rows",
    "self_test",
    "tune",
]
