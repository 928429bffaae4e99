"""How an offloaded layer group gets its product. `Backend.linear` is the one seam that `RemoteLinear` calls.

RingBackend       quantise -> exact integer product -> dequantise. The product comes from
                    simulate.Simulation   the tenant's own copy, no network: the reference
                    session.Session       providers, masked and verified
PaperPoolBackend  floats with reused Gaussian noise, as in the paper; weak, kept for comparison (masking.paper_pool)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from symbiosis_priv.kernels import RingMatrix
from symbiosis_priv.ring import FORWARD, Direction, dequantise, quantise_rows
from symbiosis_priv.weights import WeightStore
from tenant.facts import GroupFacts


class Backend(ABC):
    """Float rows in, float rows out, for one layer group and direction."""

    facts: Sequence[GroupFacts]

    @abstractmethod
    def linear(self, index: int, direction: Direction, rows: Tensor) -> Tensor:
        """The product of a layer group.

        Args:
            index: the group's index in the manifest.
            direction: forward gives `rows @ W.T + b`, backward gives `rows @ W`.
            rows: float `[r, d]`; r may be 0.

        Returns:
            float64 `[r, o]` on the device of `rows`.

        Raises:
            NonFiniteError: inf or nan in `rows`; nothing was sent.
        """

    @abstractmethod
    def close(self) -> None:
        """Release threads and connections. A closed backend cannot be used again."""

    def __enter__(self) -> Self:
        """`with backend_of(model):` closes it at the end of the block, whatever happens in it."""
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class RingProduct(Protocol):
    """An exact integer product: int32 `[r, d]` on the CPU to int32 `[r, o]`, every entry inside the range."""

    def product(self, index: int, direction: Direction, rows: Tensor) -> Tensor:
        """r is at least 1."""

    def close(self) -> None:
        """Release resources."""


class RingBackend(Backend):
    """The ring path around any exact product: bit-identical for every scheme."""

    def __init__(self, facts: Sequence[GroupFacts], products: RingProduct) -> None:
        self.facts = facts
        self.products = products

    def linear(self, index: int, direction: Direction, rows: Tensor) -> Tensor:
        facts = self.facts[index]
        if not len(rows):
            return torch.zeros((0, facts.outputs(direction)), dtype=torch.float64, device=rows.device)
        forward = direction == FORWARD
        channel_scale = facts.channel_scale.to(rows.device)
        if not forward:  # fold the weight scales into the gradient, where they are still per input column
            rows = rows.to(torch.float64, copy=True).mul_(channel_scale)
        xq, scale = quantise_rows(rows, facts.bounds[direction])
        product = self.products.product(index, direction, xq.cpu()).to(rows.device)
        y = dequantise(product, scale=scale, channel_scale=channel_scale if forward else None)
        if forward and facts.bias is not None:
            y.add_(facts.bias.to(rows.device))
        return y

    def close(self) -> None:
        self.products.close()


class Simulation:
    """`RingProduct` on the tenant's own copy of the weights: no network, no masks. What everything is compared with."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._matrices: dict[int, RingMatrix] = {}

    def product(self, index: int, direction: Direction, rows: Tensor) -> Tensor:
        if index not in self._matrices:
            weight = self._store.group(index).weight
            self._matrices[index] = RingMatrix(weight, weight_bits=self._store.weight_bits)
        return self._matrices[index].product(rows, transposed=direction != FORWARD)

    def close(self) -> None:
        self._matrices.clear()
