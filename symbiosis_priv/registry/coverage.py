"""Which layers a federation lacks, and which of them a provider that joins should serve.

PETALS' rule (Borzunov et al., 2023): of all contiguous ranges of the provider's length, take the one whose least served
layer is served least; between equals compare the second least served layer, and so on. Of ranges that are equal in all
layers the first one is taken, so that providers which know the same descriptors decide alike.

Capacity is an executor's own claim, and an executor that claims a billion would keep every provider away from its
layers. So layers that a single operator serves come first, whatever its executors claim, and no claim counts for more
than four times the median.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.federation.spelling import plain
from symbiosis_priv.registry.descriptor import VerifiedDescriptor

_ENOUGH_OPERATORS: Final = 2
_MOST_TIMES_USUAL: Final = 4.0


class Served(NamedTuple):
    """How much a layer is served.

    Args:
        operators: number of operators that serve it, at most 2: a third one makes no difference to the rule.
        capacity: sum of their executors' capacities.
    """

    operators: int = 0
    capacity: float = 0.0


def coverage(layers: int, announced: Iterable[VerifiedDescriptor]) -> list[Served]:
    """How much each layer of a model is served. Executors that are about to stop do not count.

    Args:
        layers: number of layers of the model.
        announced: executors of the model.
    """
    staying = [one for one in announced if not one.descriptor.draining]
    most = _MOST_TIMES_USUAL * statistics.median_low([one.descriptor.capacity for one in staying] or [0.0])
    operators: list[set[str]] = [set() for _ in range(layers)]
    capacities = [0.0] * layers
    for one in staying:
        for layer in range(one.descriptor.first_layer, min(one.descriptor.last_layer + 1, layers)):
            operators[layer].add(plain(one.operator))
            capacities[layer] += min(one.descriptor.capacity, most)
    return [
        Served(min(len(who), _ENOUGH_OPERATORS), capacity) for who, capacity in zip(operators, capacities, strict=True)
    ]


def most_needed(served: Sequence[Served], length: int) -> LayerRange:
    """The contiguous range of a length that a federation lacks most.

    Args:
        served: for every layer, the result of `coverage`.
        length: number of layers of the range; a model with fewer layers is taken as a whole.
    """
    length = min(length, len(served))
    starts = range(len(served) - length + 1)
    first = min(starts, key=lambda start: sorted(served[start : start + length]))
    return LayerRange(first, first + length - 1)
