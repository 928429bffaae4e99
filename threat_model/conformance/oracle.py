"""Computes correct answers from the tenant's checkpoint, without any data of the provider: integers from `quantise`,
products in numpy, floats in float64 with an error bound.

The ring product is computed in two halves: with `x = 2^16 h + l`, `|h| <= 2^15`, `0 <= l < 2^16`, both `h @ W` and `l @
W` are sums of at most 2^21 integers below 2^16 * 2^11, so exact in float64 in any order. No kernel of
`symbiosis_priv.kernels` takes part.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from symbiosis_priv.arithmetic.quantise import quantise
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts, segments
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.network.wire import Arithmetic

Array = NDArray[Any]

UNIT_ROUNDOFF = 2.0**-24
_SMALLEST_NORMAL = 2.0**-126
_Group = tuple[Array, Array, Array | None]
"""Integers int16 and weights float32, both `[o, d]`; bias float64 `[o]` or None."""

_BYTES_PER_WEIGHT = 6  # in int16 and in float32
_MEMORY = 512 << 20  # bytes of the sampled layer groups


@dataclass(frozen=True)
class Difference:
    """The first wrong entry of an answer."""

    row: int
    column: int
    got: float | int
    expected: float | int
    bound: float | None

    def __str__(self) -> str:
        within = "" if self.bound is None else f" ± {self.bound:.3g}"
        return f"answer[{self.row}, {self.column}]: got {self.got!r}, expected {self.expected!r}{within}"


class Oracle:
    """Exact products of a local checkpoint's weights. The oracle quantises the checkpoint's groups again instead of
    reading the cache, because a provider on the same machine may have written the cache. `sampled`: layer groups that
    random examples use; the sweep uses all. `seed` is that of their choice, if not all fit into memory."""

    def __init__(self, store: WeightStore, *, seed: int) -> None:
        self._store, self.manifest = store, store.manifest()
        groups = self.manifest.groups
        self._kept: dict[int, _Group] = {}
        order = list(range(len(groups)))
        random.Random(seed).shuffle(order)
        used = itertools.accumulate(_BYTES_PER_WEIGHT * groups[i].inputs * groups[i].stacked_outputs for i in order)
        fitting = max(1, sum(total <= _MEMORY for total in used))
        self.sampled = tuple(sorted(order[:fitting]))

    def entry(self, index: int) -> GroupEntry:
        return self.manifest.groups[index]

    def widths(self, index: int, direction: Direction, *, by_expert: bool = False) -> tuple[int, int]:
        """The columns of a request's rows and of its answer's rows."""
        return self.manifest.entry(index, by_expert=by_expert).columns(direction)

    def judge_ring(
        self, index: int, direction: Direction, rows: Tensor, answer: Tensor, counts: Counts | None = None
    ) -> Difference | None:
        """The first wrong entry of a ring answer to rows, int32; None if it is the product modulo 2^32. `counts`: the
        rows of every expert, if each row is for one expert of a stack."""
        return first_difference(answer, self.ring_product(index, direction, rows, counts))

    def ring_product(self, index: int, direction: Direction, rows: Tensor, counts: Counts | None = None) -> Array:
        """`rows @ W.T` (forward) or `rows @ W` modulo 2^32; int32 `[r, o]`. With `counts`, W is that of the expert."""
        weight, _, _ = self.group(index)
        if counts is None:
            return _ring_product(weight, direction, rows)
        matrices = np.split(weight, len(counts), axis=0 if self.entry(index).joined == "outputs" else 1)
        _, outputs = self.widths(index, direction, by_expert=True)
        product = np.empty((len(rows), outputs), dtype=np.int32)
        for expert, segment in segments(counts):
            product[segment] = _ring_product(matrices[expert], direction, rows[segment])
        return product

    def judge_float(
        self, index: int, direction: Direction, rows: Tensor, answer: Tensor, *, arithmetic: Arithmetic
    ) -> Difference | None:
        """The first entry of a float answer outside its error bound; None if all are inside. A float32 product with n
        non-zero terms, summed in any order, fused or not, is within `gamma_n * sum |x_i w_i|` of the true one, `gamma_n
        = n u / (1 - n u)`, u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, §3.1); terms that are
        zero add exactly. The bias is one more term. n is increased by one for the error of this float64 reference, and
        the bound allows for results below the smallest normal number, which may be flushed to zero. `rows`: float32
        `[r, d]`, too small to overflow; `answer`: float32 `[r, o]`."""
        expected, bound = self.float_product(index, direction, rows, arithmetic=arithmetic)
        return first_difference(answer.to(torch.float64), expected, bound=bound)

    def float_product(
        self, index: int, direction: Direction, rows: Tensor, *, arithmetic: Arithmetic
    ) -> tuple[Array, Array]:
        """The product in float64 and the error bound of a float32 product, both `[r, o]`."""
        _, weight, bias = self.group(index)
        matrix = (weight.T if direction == FORWARD else weight).astype(np.float64)
        x = rows.numpy().astype(np.float64)
        product, size = x @ matrix, np.abs(x) @ np.abs(matrix)
        terms = np.count_nonzero(x, axis=1)[:, None] + 1.0
        if direction == FORWARD and arithmetic == "float" and bias is not None:
            product, size, terms = product + bias, size + np.abs(bias), terms + 1.0
        nu = terms * UNIT_ROUNDOFF
        flushed = terms * _SMALLEST_NORMAL * max(1.0, np.abs(matrix).max())
        return product, nu / (1.0 - nu) * size + flushed

    def group(self, index: int) -> _Group:
        """The group's weights, quantised here."""
        if index in self._kept:
            return self._kept[index]
        layers = self._store.layers(index)
        quantised = quantise(layers, weight_bits=self._store.weight_bits)
        if quantised.digest() != self.entry(index).digest:
            raise CheckpointError(f"{self._store.path} changed since its manifest was made; start again")
        weight = torch.cat([layer.weight.to(torch.float32) for layer in layers])
        bias = None if quantised.bias is None else quantised.bias.to(torch.float64).numpy()
        group = quantised.weight.numpy(), weight.numpy(), bias
        for other in self._kept.keys() - set(self.sampled):  # the check of every layer needs one group at a time
            del self._kept[other]
        self._kept[index] = group
        return group


def _ring_product(weight: Array, direction: Direction, rows: Tensor) -> Array:
    matrix = (weight.T if direction == FORWARD else weight).astype(np.float64)
    x = rows.numpy().astype(np.int64)
    high, low = (half.astype(np.float64) @ matrix for half in (x >> 16, x & 0xFFFF))
    return ((high.astype(np.int64) << 16) + low.astype(np.int64)).astype(np.int32)


def first_difference(got: Tensor | Array, expected: Tensor | Array, *, bound: Array | None = None) -> Difference | None:
    """The first entry in which two matrices of one shape differ (by more than `bound`)."""
    got, expected = np.asarray(got), np.asarray(expected)
    if bound is not None:
        got, expected = got.astype(np.float64), expected.astype(np.float64)
    # `not <=` and not `>`: a nan is outside every bound
    wrong = got != expected if bound is None else ~(np.abs(got - expected) <= bound)
    where = np.argwhere(wrong)
    if not len(where):
        return None
    row, column = (int(i) for i in where[0])
    limit = None if bound is None else bound[row, column].item()
    return Difference(row, column, got[row, column].item(), expected[row, column].item(), limit)
