"""The ring Z_2^32: converts float rows to ring rows and back.

Theory of operation. A linear layer runs as an integer product modulo 2^32, in wrap-around `torch.int32`.
That product is exact, so adding a uniform mask before it and subtracting the mask's own product after it
leaves every bit unchanged. The *true* product `y = xq @ Wq.T` must be recoverable from its residue, so every row is
scaled until `|y| < RANGE = 2^31`, the range of int32. No guard bits are needed, because the verifier checks the
integers themselves and not their residues (`modular`).

The scale of a row comes from two Hölder bounds that hold for every output channel,

    |y_o| <= |xq|_1 * max|Wq|      and      |y_o| <= |xq|_2 * max_o |Wq[o]|_2,

of which the smaller one is used. Rounding to integers can raise the norms by d/2 and sqrt(d)/2; `Bound`
subtracts that first. The norms are taken of the *integers* `u_i = ceil(2^16 |x_i| / max|x|)`, whose sums are exact
in float64 in any order: a row's quantisation never depends on the rows beside it, the thread count or the machine.

Proof that no product leaves the range. Write F for the float64 factor below, f = F/2^16, eps = 2^-52. Division and
multiplication round once each, so `|xq_i| <= f u_i (1 + 3 eps) + 1/2`. Summing over i (Minkowski for the 2-norm)
gives `|xq|_1 <= f S1 (1 + 3 eps) + d/2` and `|xq|_2 <= f S2 (1 + 3 eps) + sqrt(d)/2`, with S1, S2 the norms of u. f is
the larger of `l1/S1` and `l2/S2`, shrunk by 2^-40, which is more than the eps terms, so one of the two Hölder bounds is
at most `(RANGE - 1) (1 + 2 eps)`, where the last factor covers the rounding of l1 and l2. That is less than
RANGE - 1/2, and products are integers: `|y| <= RANGE - 1`. Entries of xq are no larger than either norm, so they, too,
are below RANGE and fit int32.

Headroom. A masking scheme may itself add up to m to every entry of a row, and up to h to every entry of a product
(`Headroom`). That adds at most m d to |xq|_1 and m sqrt(d) to |xq|_2, so l1 and l2 leave room for it as for the
rounding, and `RANGE - 1 - h` takes the place of `RANGE - 1`: no product leaves the range with it either.

Narrow rings. With `ring_bits = w < 32` only residues modulo 2^w are sent, and the bound above would cost `32 - w` bits
of every row. So the range is a matter of statistics: rows are scaled until

    kappa |xq|_2 max_o |Wq[o]|_2 / sqrt(d) = 2^(w-1),      kappa = 12 (`SPREAD`),

where the left side is kappa standard deviations of an output if the signs of the row are random. Outputs beyond 2^(w-1)
wrap around: `y = t - 2^w k` with k zero nearly everywhere, and the verification keys find k (`wraps`). The proof above
holds with `reach = (2^(w-1) - 1) max(1, sqrt(d)/kappa)` in place of `RANGE - 1` in l2, so `|t| <= reach < 2^30` for all
d <= 2^21: the true product fits int32. In l1, `2^(w-1) - 1` takes its place, so sparse rows do not wrap. The scale of a
row depends on the row alone in every ring.

Everything in this module is public arithmetic. Masks are in `keystream`, products in `kernels`; `passes` does the same
arithmetic with compiled code.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from symbiosis_priv.errors import NonFiniteError, RangeError
from symbiosis_priv.limits import DEFAULT_RING_BITS, RingBits

Direction = Literal["forward", "backward"]  # which product of a layer group: `x @ W.T` (forward) or `g @ W` (backward)

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
DIRECTIONS: Final[tuple[Direction, Direction]] = (FORWARD, BACKWARD)


def opposite(direction: Direction) -> Direction:
    return BACKWARD if direction == FORWARD else FORWARD


class Widths(NamedTuple):
    """The width of a product's rows, and of its result."""

    rows: int
    result: int

    @classmethod
    def of(cls, inputs: int, outputs: int, direction: Direction) -> Self:
        """The widths for a weight `[outputs, inputs]`."""
        return cls(inputs, outputs) if direction == FORWARD else cls(outputs, inputs)


RANGE = 1 << 31  # every true product is smaller than this in absolute value, and so is every entry of a quantised row

SPREAD: Final = 12.0  # kappa, the number of standard deviations of an output that fit a narrow ring

_RESOLUTION = float(1 << 16)
_SHRINK = 1.0 - 2.0**-40
_BLOCK = 1 << 16  # entries per thread, so that the passes over them stay in the cache
_MAX_WIDTH = 1 << 21  # sums of squared 16-bit integers stay exact in float64 up to here


class Headroom(NamedTuple):
    """What a masking scheme adds itself: to every entry of a row and of a product, at most, in absolute value."""

    noise: int = 0
    error: int = 0


NO_HEADROOM: Final = Headroom()


@dataclass(frozen=True)
class Bound:
    """Bounds the input rows of a product, for one layer group and direction. Follows from the public weights."""

    inputs: int  # input features d of the product
    weight_absmax: int  # max |Wq| over the whole matrix
    weight_norm: float  # max over output channels of the channel's 2-norm
    ring_bits: RingBits = DEFAULT_RING_BITS  # w, bits of the integers on the wire
    spread: float = SPREAD  # kappa
    headroom: Headroom = NO_HEADROOM

    def __post_init__(self) -> None:
        if not 0 < self.inputs <= _MAX_WIDTH:
            raise RangeError(
                f"a product of {self.inputs} inputs is outside 1..{_MAX_WIDTH}; keep this layer on the tenant"
            )
        if self.l2 <= 0:  # the bound on the 1-norm is not needed: the larger of the two scales is used
            raise RangeError(f"rounding alone may leave the range at {self.inputs}; use fewer weight bits")

    @functools.cached_property
    def l1(self) -> float:
        """Largest allowed 1-norm of the scaled row before rounding."""
        rounding = self.headroom.noise + 0.5
        return max(0.0, (self._half - 1 - self.headroom.error) / max(self.weight_absmax, 1) - self.inputs * rounding)

    @functools.cached_property
    def l2(self) -> float:
        """Largest allowed 2-norm of the scaled row before rounding."""
        rounding = self.headroom.noise + 0.5
        return (self.reach - self.headroom.error) / max(self.weight_norm, 1.0) - math.sqrt(self.inputs) * rounding

    @functools.cached_property
    def reach(self) -> float:
        """Largest absolute value of a true product."""
        wide = self.ring_bits == DEFAULT_RING_BITS
        return (self._half - 1) * (1.0 if wide else max(1.0, math.sqrt(self.inputs) / self.spread))

    @functools.cached_property
    def most_wraps(self) -> int:
        """Largest |k| of an entry `t - 2^w k` of an answer; 0 if products cannot leave the ring."""
        return int((self.reach + self._half) // (2 * self._half))

    @property
    def _half(self) -> int:
        return 1 << self.ring_bits - 1

    def narrowed(self, ring_bits: RingBits, headroom: Headroom = NO_HEADROOM) -> Self:
        """The bound for products of which `ring_bits` bits are sent, and to which a scheme adds something."""
        return replace(self, ring_bits=ring_bits, headroom=headroom)

    def halved(self) -> Self:
        """The bound for rows at half the scale: fewer entries of their products wrap."""
        return replace(self, spread=2 * self.spread)


def bounds_of(inputs: int, outputs: int, *, absmax: int, row_norm: float, column_norm: float) -> dict[Direction, Bound]:
    """The bounds of both directions for a weight `[outputs, inputs]`, from its largest entry and norms."""
    return {
        FORWARD: Bound(inputs=inputs, weight_absmax=absmax, weight_norm=row_norm),
        BACKWARD: Bound(inputs=outputs, weight_absmax=absmax, weight_norm=column_norm),
    }


def quantise_rows(rows: Tensor, bound: Bound, *, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scale and round float rows so that their product stays inside the range. `rows` are `[r, d]` on the CPU, of any
    floating dtype; `d == bound.inputs`. `fold`, float64 `[d]`, are factors of the columns before quantisation. Returns
    `(xq, scale)`: int32 `[r, d]` and float64 `[r, 1]` with `rows ~= xq * scale`. The scale is secret (rule 5). Raises
    `NonFiniteError`: a row holds inf or nan."""
    v = torch.empty(rows.shape, dtype=torch.float64, device="cpu").copy_(rows.detach())
    if fold is not None:
        v.mul_(fold)
    peak = (u := v.abs()).amax(dim=1, keepdim=True)
    if not bool((peak < math.inf).all()):
        raise NonFiniteError
    peak.masked_fill_(peak == 0, 1.0)
    torch.abs(v.div_(peak), out=u).mul_(_RESOLUTION).ceil_()
    s1 = u.sum(dim=1, keepdim=True).clamp_(min=1.0)
    s2 = u.square_().sum(dim=1, keepdim=True).clamp_(min=1.0)
    # correctly rounded everywhere, unlike torch's, which depends on the math library
    np.sqrt(s2.numpy(), out=s2.numpy())
    factor = torch.maximum(s1.reciprocal_().mul_(bound.l1), s2.reciprocal_().mul_(bound.l2)) * (_RESOLUTION * _SHRINK)
    return v.mul_(factor).round_().to(torch.int32), peak / factor


def dequantise(product: Tensor, *, scale: Tensor, channel_scale: Tensor | None = None) -> Tensor:
    """Turn an unmasked ring product, int32 `[r, o]`, back into float64 `[r, o]`. `scale`: float64 `[r, 1]` from
    `quantise_rows`. `channel_scale`: float64 `[o]`; None when it was folded into the rows (backward)."""
    y = product.to(torch.float64)
    if channel_scale is not None:
        y = y.mul_(channel_scale)  # before the row scale, so that it overflows only if the result does
    return y.mul_(scale)


def row_blocks(rows: int, width: int) -> list[tuple[int, int]]:
    """Split rows into ranges, so that the float64 values of one range stay in the cache."""
    step = max(1, torch.get_num_threads() * _BLOCK // max(1, width))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
