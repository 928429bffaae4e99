"""Exact matrix products modulo 2^32, and the choice between them.

A kernel packs a weight matrix once and multiplies in both directions with that one copy. The copy takes 1 byte per
weight up to 8 weight bits, and 10 bits at 9 and 10 weight bits, with few exceptions. `RingMatrix` is the interface for
callers.

    native-*     compiled code for one instruction set: int8 limbs on AMX, int16 limbs on others (kernel)
    plain        torch: int32, which wraps, or float64; on a GPU, only where the others cannot run (kernel)
    triton-int8  int8 matrix units of a GPU (triton_kernel)
    triton-fp16  float16 matrix units of a GPU, for B200 and B300 (triton_kernel)
"""

from symbiosis_priv.kernels.choice import KERNELS as KERNELS
from symbiosis_priv.kernels.choice import Choice as Choice
from symbiosis_priv.kernels.choice import bits_per_weight as bits_per_weight
from symbiosis_priv.kernels.choice import choose as choose
from symbiosis_priv.kernels.choice import is_exact as is_exact
from symbiosis_priv.kernels.choice import probe_rows as probe_rows
from symbiosis_priv.kernels.choice import self_test as self_test
from symbiosis_priv.kernels.kernel import Kernel as Kernel
from symbiosis_priv.kernels.kernel import Packed as Packed
from symbiosis_priv.kernels.matrix import RingMatrix as RingMatrix
