"""Quantises weights to integers. Every party gets the same bits.

Per output channel, symmetric: `s_o = max|W[o]| / (2^(b-1) - 1)`, `Wq = round(W / s_o)`, in float64 on the CPU. Linears
that share an input are one layer group: their matrices are stacked along the output dimension.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic.passes import large_tensor
from symbiosis_priv.arithmetic.ring import Bound, Direction, bounds_of, row_blocks
from symbiosis_priv.errors import CheckpointError, ConfigError
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS
from symbiosis_priv.native import all_rows, layout, pointer, readable

_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Layer:
    """A frozen linear of a checkpoint: `weight` `[o, d]` float, `bias` `[o]` float or None."""

    name: str
    weight: Tensor
    bias: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """The weight in blocks: their rows, their columns, and their numbers."""
        yield slice(None), slice(None), self.weight


@dataclass(frozen=True)
class Stack:
    """A stack of experts as one frozen linear `[o, d]` without a bias. Its matrices are in memory one at a time."""

    name: str
    shape: tuple[int, int]  # (o, d)
    matrices: Sequence[Callable[[], Tensor]]  # each reads the float matrix of one expert
    joined: Literal["outputs", "inputs"]  # the matrices' rows follow each other, or their columns (`layers.GroupSpec`)
    bias: None = None

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """As `Layer.blocks`: a block for each expert."""
        size = self.shape[0 if self.joined == "outputs" else 1] // len(self.matrices)
        for index, read in enumerate(self.matrices):
            place, whole = slice(index * size, (index + 1) * size), slice(None)
            yield (place, whole, read()) if self.joined == "outputs" else (whole, place, read())

    @property
    def weight(self) -> Tensor:
        """The whole matrix `[o, d]`, in the dtype of the first expert's."""
        blocks = list(self.blocks())
        return torch.cat([matrix for _, _, matrix in blocks], dim=0 if self.joined == "outputs" else 1)


@dataclass(frozen=True)
class QuantisedGroup:
    """A layer group in the ring."""

    weight: Tensor  # int16 `[o, d]`, the members' channels stacked
    channel_scale: Tensor  # float64 `[o]`
    bias: Tensor | None  # float32 `[o]`, zeros for members without one; None when no member has one

    def digest(self) -> str:
        """SHA-256 over shape, integers, scales and bias, as little-endian bytes."""
        parts = {"weight": self.weight, "channel_scale": self.channel_scale, "bias": self.bias}
        sha = hashlib.sha256()
        for name, tensor in parts.items():
            if tensor is None:
                continue
            array = tensor.contiguous().numpy()
            little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            sha.update(msgspec.json.encode([name, little.dtype.str, list(little.shape)]))
            sha.update(little.data.cast("B"))
        return sha.hexdigest()

    def bounds(self, *, experts: int = 1, along_outputs: bool = True) -> dict[Direction, Bound]:
        """The public bounds of both directions, from one pass over the weights. For rows that each belong to one expert
        of a stack, the norms are the largest of any expert's matrix. So the scale of a row does not depend on its
        expert, and every product is in range. The experts' matrices are joined along the outputs or along the
        inputs."""
        matrices = self.weight.chunk(experts, dim=0 if along_outputs else 1)
        outputs, inputs = matrices[0].shape
        absmax, row, column = (max(norms) for norms in zip(*map(_norms, matrices), strict=True))
        return bounds_of(inputs, outputs, absmax=absmax, row_norm=math.sqrt(row), column_norm=math.sqrt(column))


def quantise(layers: Sequence[Layer | Stack], *, weight_bits: int = DEFAULT_WEIGHT_BITS) -> QuantisedGroup:
    """Quantise the members of one group. Raises `CheckpointError`: a weight or bias holds inf or nan, a bias has the
    wrong length, or members disagree on the input width; `ConfigError`: `weight_bits` outside 4..12."""
    if not MIN_WEIGHT_BITS <= weight_bits <= MAX_WEIGHT_BITS:
        raise ConfigError(f"weight_bits = {weight_bits} is outside {MIN_WEIGHT_BITS}..{MAX_WEIGHT_BITS}")
    if len({layer.shape[1] for layer in layers}) != 1:
        raise CheckpointError(f"{[layer.name for layer in layers]} do not share an input width")
    outputs = [layer.shape[0] for layer in layers]
    weight = large_tensor((sum(outputs), layers[0].shape[1]), dtype=torch.int16)
    channel_scale = torch.empty(sum(outputs), dtype=torch.float64, device="cpu")
    biases, levels = [], 2 ** (weight_bits - 1) - 1
    for layer, out, scale in zip(layers, weight.split(outputs), channel_scale.split(outputs), strict=True):
        known = isinstance(layer, Stack) and layer.joined == "inputs"
        if known:  # a row goes through all matrices, so they are read twice
            peak = torch.zeros_like(scale)
            for _, _, matrix in layer.blocks():
                low, high = matrix.cpu().aminmax(dim=1)
                torch.maximum(peak, torch.maximum(-low, high).to(torch.float64), out=peak)
            scale.copy_(_steps(peak, levels))
        for rows, columns, matrix in layer.blocks():
            matrix, part = matrix.cpu(), out[rows, columns]
            if not _quantise(matrix, levels=0 if known else levels, out=part, scale=scale[rows]):
                raise CheckpointError(f"the weight of {layer.name} holds inf or nan")
        bias = torch.zeros(len(out), dtype=torch.float32, device="cpu") if layer.bias is None else layer.bias
        bias = bias.to(device="cpu", dtype=torch.float32)
        if bias.shape != (len(out),) or not bool(torch.isfinite(bias).all()):
            raise CheckpointError(f"the bias of {layer.name} holds inf or nan, or has the wrong length")
        biases.append(bias)
    stacked = torch.cat(biases) if any(layer.bias is not None for layer in layers) else None
    return QuantisedGroup(weight, channel_scale, stacked)


_COMPOSED_BITS = 19
"""Bits of an entry's size in the integer matrices that `compose` multiplies: 2^10 times finer than the result's."""
_COMPOSED_ROWS = 1024  # rows that are float64 at the same time


def compose(second: Tensor, gain: Tensor, first: Tensor) -> Tensor:
    """The matrix `second diag(gain) first`, to be quantised again. Every party gets the same bits.

    Both factors are rounded to integers of 19 bits and a sign: each row of `first`, and each row of `second` times
    `gain` and the scales of the rows of `first`. These steps work on single entries, in float64, where each operation
    is correctly rounded. The product of the integers is exact in float64 whatever the order of its sums, the number of
    threads and the library, because no partial sum exceeds 2^53: d is at most 2^15. Its rounding to float32 works on
    single entries again. Takes float `[o, d]`, `[d]` and `[d, k]`. Returns float32 `[o, k]`; inf or nan where a weight
    is inf or nan. Raises `CheckpointError`: d is larger."""
    width = gain.shape[0]
    if width > 1 << 53 - 2 * _COMPOSED_BITS:
        raise CheckpointError(f"rows of {width} numbers are too long to be composed exactly; remove round_trips")
    levels = 2.0**_COMPOSED_BITS
    below, scale = _rounded(first.cpu(), levels)
    gain = gain.cpu().to(torch.float64) * scale
    composed = large_tensor((second.shape[0], first.shape[1]), dtype=torch.float32)
    for start in range(0, len(second), _COMPOSED_ROWS):
        rows = slice(start, start + _COMPOSED_ROWS)
        above, scale = _rounded(second[rows].cpu().to(torch.float64) * gain, levels)
        composed[rows] = (above @ below) * scale[:, None]
    return composed


def centred(matrix: Tensor) -> Tensor:
    """Subtract from each column of a float matrix `[d, k]` its mean, for `compose`. Every party gets the same bits: the
    mean is that of integers of 38 bits, whose sum float64 holds exactly. Returns float64 `[d, k]`."""
    matrix = matrix.cpu().to(torch.float64)
    unit = max(matrix.abs().max().item() / 2.0 ** (2 * _COMPOSED_BITS), _TINY)
    return matrix - (matrix / unit).round_().sum(dim=0) * (unit / len(matrix))


def _rounded(weight: Tensor, levels: float) -> tuple[Tensor, Tensor]:
    """Float64 `[o, d]` of integers up to `levels`, and the scales of the rows, float64 `[o]`."""
    weight = weight.to(torch.float64)
    scale = weight.abs().amax(dim=1) / levels
    scale = torch.where(scale < _TINY, 0.0, scale)  # zeros, or too small for a product in float32
    return (weight / torch.where(scale == 0, torch.inf, scale)[:, None]).round_(), scale


def _quantise(weight: Tensor, *, levels: int, out: Tensor, scale: Tensor) -> bool:
    """Fill int16 `[o, d]` and float64 `[o]` from a float matrix; False if it holds inf or nan. With `levels` = 0, the
    scales are filled already."""
    library = native.library()
    rows, width = out.shape
    if library is None or not levels:
        for start, stop in row_blocks(rows, width):
            w = weight[start:stop].to(torch.float64)
            if levels:
                scale[start:stop] = _steps(w.abs().amax(dim=1), levels)
            if not bool(scale[start:stop].isfinite().all()):
                return False
            out[start:stop] = (w / scale[start:stop, None]).round_()
        return True
    parts = readable([weight])
    how = native.best(library), layout(parts), width, levels, out.data_ptr(), scale.data_ptr()
    return all_rows(library.ring_quantise, *how, rows=rows, width=width)


def _steps(peak: Tensor, levels: int) -> Tensor:
    """The scales of channels whose largest |w| is `peak`, float64 `[o]`."""
    # a zero channel, or a subnormal scale: too coarse to keep |Wq| < 2^(b-1), and no float32 output shows it
    return torch.where(peak / levels < _TINY, 1.0, peak / levels)


def _norms(weight: Tensor) -> tuple[int, int, int]:
    """Max |w| of int16 `[o, d]`, the largest sum of squares of a row, and the largest of a column."""
    library = native.library()
    outputs, inputs = weight.shape
    if not weight.numel():
        return 0, 0, 0
    if library is None:
        low, high = weight.aminmax()
        columns, row = torch.zeros(inputs, dtype=torch.float64, device="cpu"), 0.0
        for start, stop in row_blocks(outputs, inputs):
            squares = weight[start:stop].to(torch.float64).square_()  # integers: sums are exact
            row = max(row, float(squares.sum(dim=1).amax()))
            columns += squares.sum(dim=0)
        return max(-int(low), int(high)), int(row), int(columns.amax())
    weight = weight.contiguous()
    columns = torch.zeros(inputs, dtype=torch.int64, device="cpu")
    largest = torch.empty(3, dtype=torch.int64, device="cpu")
    library.ring_norms(native.best(library), pointer(weight), outputs, inputs, pointer(columns), pointer(largest))
    absmax, row, column = largest.tolist()
    return absmax, row, column
