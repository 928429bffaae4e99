"""Quantises weights to integers. Every party gets the same bits.

Per output channel, symmetric: `s_o = max|W[o]| / (2^(b-1) - 1)`, `Wq = round(W / s_o)`, in float64 on the CPU. Linears
that share an input are one layer group: their matrices are stacked along the output dimension.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

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

    def bound(self, direction: Direction) -> Bound:
        return self.bounds()[direction]

    def bounds(self, *, experts: int = 1, along_outputs: bool = True) -> dict[Direction, Bound]:
        """The public bounds of both directions, from one pass over the weights.

        For rows that each belong to one expert of a stack, the norms are the largest of any expert's matrix. So the
        scale of a row does not depend on its expert, and every product is in range. The experts' matrices are joined
        along the outputs or along the inputs.
        """
        matrices = self.weight.chunk(experts, dim=0 if along_outputs else 1)
        outputs, inputs = matrices[0].shape
        absmax, row, column = (max(norms) for norms in zip(*map(_norms, matrices), strict=True))
        return bounds_of(inputs, outputs, absmax=absmax, row_norm=math.sqrt(row), column_norm=math.sqrt(column))


def quantise(layers: Sequence[Layer], *, weight_bits: int = DEFAULT_WEIGHT_BITS) -> QuantisedGroup:
    """Quantise the members of one group. Raises `CheckpointError`: a weight or bias holds inf or nan, a bias has the
    wrong length, or members disagree on the input width; `ConfigError`: `weight_bits` outside 4..12."""
    if not MIN_WEIGHT_BITS <= weight_bits <= MAX_WEIGHT_BITS:
        raise ConfigError(f"weight_bits = {weight_bits} is outside {MIN_WEIGHT_BITS}..{MAX_WEIGHT_BITS}")
    if len({layer.weight.shape[1] for layer in layers}) != 1:
        raise CheckpointError(f"{[layer.name for layer in layers]} do not share an input width")
    outputs = [len(layer.weight) for layer in layers]
    weight = large_tensor((sum(outputs), layers[0].weight.shape[1]), dtype=torch.int16)
    channel_scale = torch.empty(sum(outputs), dtype=torch.float64, device="cpu")
    biases = []
    for layer, rows, scale in zip(layers, weight.split(outputs), channel_scale.split(outputs), strict=True):
        if not _quantise(layer.weight.cpu(), levels=2 ** (weight_bits - 1) - 1, out=rows, scale=scale):
            raise CheckpointError(f"the weight of {layer.name} holds inf or nan")
        bias = torch.zeros(len(rows), dtype=torch.float32, device="cpu") if layer.bias is None else layer.bias
        bias = bias.to(device="cpu", dtype=torch.float32)
        if bias.shape != (len(rows),) or not bool(torch.isfinite(bias).all()):
            raise CheckpointError(f"the bias of {layer.name} holds inf or nan, or has the wrong length")
        biases.append(bias)
    stacked = torch.cat(biases) if any(layer.bias is not None for layer in layers) else None
    return QuantisedGroup(weight, channel_scale, stacked)


def _quantise(weight: Tensor, *, levels: int, out: Tensor, scale: Tensor) -> bool:
    """Fill int16 `[o, d]` and float64 `[o]` from a float matrix; False if it holds inf or nan."""
    library = native.library()
    rows, width = out.shape
    if library is None:
        for start, stop in row_blocks(rows, width):
            w = weight[start:stop].to(torch.float64)
            peak = w.abs().amax(dim=1)
            if not bool(torch.isfinite(peak).all()):
                return False
            # a zero channel, or a subnormal scale: too coarse to keep |Wq| < 2^(b-1), and no float32 output shows it
            step = peak / levels
            scale[start:stop] = torch.where(step < _TINY, 1.0, step)
            out[start:stop] = (w / scale[start:stop, None]).round_()
        return True
    parts = readable([weight])
    how = native.best(library), layout(parts), width, levels, out.data_ptr(), scale.data_ptr()
    return all_rows(library.ring_quantise, *how, rows=rows, width=width)


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
