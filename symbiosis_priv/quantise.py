"""Weights to integers, the same bits for every party (DESIGN §2).

Per output channel, symmetric: `s_o = max|W[o]| / (2^(b-1) - 1)`, `Wq = round(W / s_o)`, in float64 on the CPU.
Siblings that share an input are one group: their matrices are stacked along the output dimension.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from symbiosis_priv.errors import CheckpointError, ConfigError
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS
from symbiosis_priv.ring import FORWARD, Bound, Direction

_TINY = torch.finfo(torch.float64).tiny
_BLOCK = 1 << 16  # entries per thread


@dataclass(frozen=True)
class Layer:
    """One frozen linear as it is in the checkpoint: `weight` `[o, d]` float, `bias` `[o]` float or None."""

    name: str
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class QuantisedGroup:
    """A layer group in the ring.

    Args:
        weight: int16 `[o, d]`, the members' channels stacked.
        channel_scale: float64 `[o]`.
        bias: float32 `[o]`, zeros for members without one; None when no member has one.
    """

    weight: Tensor
    channel_scale: Tensor
    bias: Tensor | None

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
        """The public bound on input rows for a direction."""
        forward = direction == FORWARD
        width = self.weight.shape[1 if forward else 0]
        if not self.weight.numel():
            return Bound(inputs=width, weight_absmax=0, weight_norm=0.0)
        low, high = self.weight.aminmax()
        squares = [block.to(torch.float64).square_().sum(dim=1 if forward else 0) for block in _blocks(self.weight)]
        longest = (torch.cat(squares) if forward else torch.stack(squares).sum(dim=0)).amax()  # integers: exact
        return Bound(inputs=width, weight_absmax=max(-int(low), int(high)), weight_norm=math.sqrt(float(longest)))


def quantise(layers: Sequence[Layer], *, weight_bits: int = DEFAULT_WEIGHT_BITS) -> QuantisedGroup:
    """Quantise the members of one group.

    Raises:
        CheckpointError: a weight or bias holds inf or nan, a bias has the wrong length, or members disagree on
            the input width.
        ConfigError: `weight_bits` outside 4..12.
    """
    if not MIN_WEIGHT_BITS <= weight_bits <= MAX_WEIGHT_BITS:
        raise ConfigError(f"weight_bits = {weight_bits} is outside {MIN_WEIGHT_BITS}..{MAX_WEIGHT_BITS}")
    integers, scales, biases = [], [], []
    for layer in layers:
        for block in _blocks(layer.weight):
            w = block.to(device="cpu", dtype=torch.float64)
            peak = w.abs().amax(dim=1)
            if not bool(torch.isfinite(peak).all()):
                raise CheckpointError(f"the weight of {layer.name} holds inf or nan")
            scale = peak / (2 ** (weight_bits - 1) - 1)
            # a zero channel, or a subnormal scale: too coarse to keep |Wq| < 2^(b-1), and no float32 output shows it
            scale = torch.where(scale < _TINY, 1.0, scale)
            integers.append((w / scale[:, None]).round_().to(torch.int16))
            scales.append(scale)
        outputs = layer.weight.shape[0]
        bias = torch.zeros(outputs, dtype=torch.float32, device="cpu") if layer.bias is None else layer.bias
        bias = bias.to(device="cpu", dtype=torch.float32)
        if bias.shape != (outputs,) or not bool(torch.isfinite(bias).all()):
            raise CheckpointError(f"the bias of {layer.name} holds inf or nan, or has the wrong length")
        biases.append(bias)
    if len({w.shape[1] for w in integers}) != 1:
        raise CheckpointError(f"{[layer.name for layer in layers]} do not share an input width")
    return QuantisedGroup(
        weight=torch.cat(integers),
        channel_scale=torch.cat(scales),
        bias=torch.cat(biases) if any(layer.bias is not None for layer in layers) else None,
    )


def _blocks(matrix: Tensor) -> Sequence[Tensor]:
    """A matrix in blocks of rows whose float64 values stay in the cache."""
    return torch.split(matrix, max(1, torch.get_num_threads() * _BLOCK // max(1, matrix.shape[1])))
