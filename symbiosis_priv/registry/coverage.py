"""Which layers a federation lacks, and which of them a provider that joins should serve.

PETALS' rule (Borzunov et al., 2023): of all contiguous ranges of the provider's length, the one whose least served
layer is served least; between equals, the one whose second least served layer is, and so on. Left are the ranges that
are equally needed; the first of them is taken, so that everybody who knows the same descriptors decides alike.

What an executor can do is its own word, and the rule would have everybody keep away from the layers of one that says a
billion. So layers that a single operator serves come first, whatever that one says, and nobody counts for more than
four times what is usual.
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
        operators: how many serve it, two at most: a third one is no more independent of the others.
        capacity: what their executors can do together.
    """

    operators: int = 0
    capacity: float = 0.0


def coverage(layers: int, announced: Iterable[VerifiedDescriptor]) -> list[Served]:
    """How much each layer of a model is served. Executors that are about to leave count for nothing.

    Args:
        layers: of the model.
        announced: executors of it.
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
        served: every layer, as `coverage` says.
        length: layers of the range; the whole model if it has no more.
    """
    length = min(length, len(served))
    starts = range(len(served) - length + 1)
    first = min(starts, key=lambda start: sorted(served[start : start + length]))
    return LayerRange(first, first + length - 1)
