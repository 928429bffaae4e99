"""The interface of a kernel: it packs weights, and computes exact products modulo 2^32 with them in both directions."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import Direction, Widths


@dataclass(frozen=True)
class Packed:
    """A weight matrix in the layout of some kernels: one plain tensor, so that it can be mapped from disk and shared.

    Args:
        layout: `Kernel.layout` of the kernels that can read it.
        outputs: output features o of the weight.
        inputs: input features d of the weight.
        weight_bits: bits of a weight. A packed weight takes 1 byte up to 8 bits, and 2 bytes beyond.
        data: contiguous int8 or int16.
    """

    layout: str
    outputs: int
    inputs: int
    weight_bits: int
    data: Tensor

    def columns(self, direction: Direction) -> Widths:
        """The columns of a product's rows and of its result."""
        return Widths.of(self.inputs, self.outputs, direction)

    def to(self, device: torch.device) -> Self:
        return replace(self, data=self.data.to(device))


class Kernel(ABC):
    """Multiplies with packed weights. Kernels of the same layout share packed weights."""

    name: str
    layout: ClassVar[str]
    shard_granule: ClassVar[int | None] = None
    """Output channels in one element of the packed data's first dimension. The data can be sharded there. None if it
    cannot."""

    granule: ClassVar[int]
    """`cut` divides packed weights at multiples of this number of outputs."""

    @abstractmethod
    def supports(self, device: torch.device) -> bool:
        """Returns True if products run on this device."""

    def is_candidate(self, device: torch.device) -> bool:
        """Returns True if this kernel may be the fastest on a device that it supports."""
        return True

    def max_terms(self) -> int:
        """The widest row whose product is exact."""
        return 1 << 62

    @abstractmethod
    def form(self, outputs: int, inputs: int, *, weight_bits: int) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of the packed tensor."""

    @abstractmethod
    def pack(self, weight: Tensor, *, weight_bits: int) -> Packed:
        """Pack int16 `[o, d]`, `|weight| < 2^(weight_bits - 1)`, on the CPU. The result shares no memory with
        `weight`."""

    def cut(self, packed: Packed, start: int, stop: int) -> Packed:
        """The packed weights of the outputs `start` to `stop - 1`. Both limits are multiples of `granule`. The result
        shares memory with `packed`."""
        data = packed.data[start // self.granule : stop // self.granule]
        return replace(packed, outputs=stop - start, data=data)

    def prepare(self, packed: Packed) -> None:  # noqa: B027
        """Do the work that the first products with these weights, on their device, would otherwise wait for."""

    @abstractmethod
    def product(self, packed: Packed, rows: Tensor, direction: Direction, out: Tensor) -> None:
        """`rows @ weight.T` forward, `rows @ weight` backward, mod 2^32.

        Args:
            packed: weights in this kernel's layout.
            rows: int32 `[r, d]` forward, `[r, o]` backward, r >= 1, contiguous, on the packed weights' device.
            out: int32 `[r, o]` or `[r, d]`, contiguous, overwritten.
        """
