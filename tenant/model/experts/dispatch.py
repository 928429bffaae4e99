"""Sends the rows of tokens to their experts in the two products of a layer, with one class per mode.

Notation: t tokens, k experts per token, e experts in all, s = t k pairs of token and expert.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts
from tenant.model.experts.stack import OffloadedStack
from tenant.model.remote_linear import LayerGroup, output_dtype


class Dispatch(ABC):
    """The routes of one forward pass: `index`, int64 `[t, k]`, holds the experts of each token."""

    def __init__(self, index: Tensor, *, experts: int) -> None:
        self.index, self.experts = index, experts

    @abstractmethod
    def spread(self, stack: OffloadedStack, x: Tensor) -> Tensor:
        """Multiply each token by the matrices of its experts: float `[t, d]` to `[s, w]`."""

    @abstractmethod
    def gather(self, stack: OffloadedStack, rows: Tensor) -> Tensor:
        """Multiply each row by its expert's matrix, and sum over each token's experts: float `[s, w]` to `[t, d]`."""


class Everywhere(Dispatch):
    """Mode "all": every token goes to every expert, with zeros where an expert does not take part."""

    def spread(self, stack: OffloadedStack, x: Tensor) -> Tensor:
        every = stack.product(x).unflatten(1, (self.experts, -1))
        rows: Tensor = every.take_along_dim(self.index[..., None], dim=1).flatten(0, 1)
        return rows

    def gather(self, stack: OffloadedStack, rows: Tensor) -> Tensor:
        rows = rows.unflatten(0, self.index.shape)
        every = rows.new_zeros(rows.shape[0], self.experts, rows.shape[2])
        return stack.product(every.scatter_add(1, self.index[..., None].expand_as(rows), rows).flatten(1))


class AsRouted(Dispatch):
    """Mode "counts": rows sorted by expert. Providers see how many rows each expert gets.

    Attributes:
        counts: the number of rows that are sent for each expert.
        places: int64 `[s]`. For each pair of token and expert, the index of its row among the rows that are sent.
    """

    def __init__(self, index: Tensor, *, experts: int) -> None:
        super().__init__(index, experts=experts)
        chosen = index.flatten()
        counts = chosen.bincount(minlength=experts)
        order = chosen.argsort(stable=True)
        sizes = self.sizes(counts)
        first, start = counts.cumsum(0) - counts, sizes.cumsum(0) - sizes  # of each expert: sorted, and as sent
        places = torch.arange(len(chosen), dtype=torch.long, device=index.device) + (start - first)[chosen[order]]
        self.places = torch.empty_like(order).index_copy_(0, order, places)
        self.counts: Counts = tuple(sizes.tolist())

    def sizes(self, counts: Tensor) -> Tensor:
        """Return the number of rows that are sent for each expert, int64 `[e]`, at least its count."""
        return counts

    def spread(self, stack: OffloadedStack, x: Tensor) -> Tensor:
        return self._product(stack, x.repeat_interleave(self.index.shape[1], dim=0))

    def gather(self, stack: OffloadedStack, rows: Tensor) -> Tensor:
        product: Tensor = self._product(stack, rows).unflatten(0, self.index.shape)
        return product.sum(1)

    def _product(self, stack: OffloadedStack, rows: Tensor) -> Tensor:
        sent = rows.new_zeros(sum(self.counts), rows.shape[1]).index_copy(0, self.places, rows)
        product: Tensor = _ProductByExpert.apply(sent, stack.group, self.counts)  # type: ignore[no-untyped-call]
        return product[self.places]


class Flat(AsRouted):
    """Mode "flat": each expert gets as many rows as the expert with the most tokens, filled up with rows of zeros.
    Masked, these look like other rows, so providers see the largest count but not its expert."""

    def sizes(self, counts: Tensor) -> Tensor:
        return counts.max().expand_as(counts)


class _ProductByExpert(torch.autograd.Function):
    """Multiplies rows that are sorted by expert, each by its own expert's matrix."""

    @staticmethod
    def forward(rows: Tensor, group: LayerGroup, counts: Counts) -> Tensor:
        return _multiply(rows, group, counts, FORWARD, output_dtype(rows))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, LayerGroup, Counts], output: Tensor) -> None:
        rows, ctx.group, ctx.counts = inputs
        ctx.dtype = rows.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _multiply(grad, ctx.group, ctx.counts, BACKWARD, ctx.dtype), None, None


def _multiply(rows: Tensor, group: LayerGroup, counts: Counts, direction: Direction, dtype: torch.dtype) -> Tensor:
    _, width = group.backend.facts[group.index].for_rows(counts).columns[direction]
    product = torch.empty(rows.shape[0], width, dtype=dtype, device=rows.device)
    group.multiply(direction, [rows], [product], counts=counts)
    return product
