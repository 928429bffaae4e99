"""Counts how much each layer of a model is served, and chooses the layers that a new provider should serve.

The rule is that of PETALS (Borzunov et al., 2023): of all contiguous ranges of the provider's length, take the range
whose least served layer is served least; if ranges are equal, compare the second least served layer, and so on. If
ranges are equal in all layers, the first range is taken, so providers with the same descriptors decide alike.

An executor states its own capacity. Without a limit, an executor could claim a huge capacity and so keep all other
providers away from its layers. So layers with fewer operators come first, regardless of capacity, and a capacity counts
at most four times the median.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.federation.parties import plain
from symbiosis_priv.registry.descriptor import VerifiedDescriptor

_ENOUGH_OPERATORS: Final = 2
_MOST_TIMES_USUAL: Final = 4.0


class Served(NamedTuple):
    """The number of operators that serve a layer, at most 2, and the sum of their capacities."""

    operators: int = 0
    capacity: float = 0.0


def coverage(layers: int, announced: Iterable[VerifiedDescriptor]) -> list[Served]:
    """The operators and the capacity that serve each layer of a model. Draining executors do not count."""
    staying = [one for one in announced if not one.descriptor.draining]
    most = _MOST_TIMES_USUAL * statistics.median_low([one.descriptor.capacity for one in staying] or [0.0])
    operators: list[set[str]] = [set() for _ in range(layers)]
    capacities = [0.0] * layers
    for one in staying:
        for layer in range(one.descriptor.first_layer, min(one.descriptor.last_layer + 1, layers)):
            operators[layer].add(plain(one.operator))
            capacities[layer] += min(one.descriptor.capacity, most)
    return [
        Served(min(len(names), _ENOUGH_OPERATORS), capacity)
        for names, capacity in zip(operators, capacities, strict=True)
    ]


def most_needed(served: Sequence[Served], length: int) -> LayerRange:
    """The contiguous range of `length` layers that is served least; all layers if the model has fewer."""
    length = min(length, len(served))
    starts = range(len(served) - length + 1)
    first = min(starts, key=lambda start: sorted(served[start : start + length]))
    return LayerRange(first, first + length - 1)
