"""Which layers a federation lacks, and which of them a provider that joins should serve.

PETALS' rule (Borzunov et al., 2023): of all contiguous ranges of the provider's length, the one whose least served
layer is served least; between equals, the one whose second least served layer is, and so on. Left are the ranges that
are equally needed; the first of them is taken, so that everybody who knows the same descriptors decides alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from symbiosis_priv.descriptor import Announced
from symbiosis_priv.layers import LayerRange


def coverage(layers: int, announced: Iterable[Announced]) -> list[float]:
    """What the executors of a model can do for each of its layers: the sum of their capacities. Those about to leave
    count for nothing.

    Args:
        layers: of the model.
        announced: executors of it.
    """
    found = [0.0] * layers
    for said in (one.said for one in announced if not one.said.draining):
        for layer in range(said.first_layer, min(said.last_layer + 1, layers)):
            found[layer] += said.capacity
    return found


def most_needed(capacities: Sequence[float], length: int) -> LayerRange:
    """The contiguous range of a length that a federation lacks most.

    Args:
        capacities: of every layer, as `coverage` gives them.
        length: layers of the range; the whole model if it has no more.
    """
    length = min(length, len(capacities))
    starts = range(len(capacities) - length + 1)
    first = min(starts, key=lambda start: sorted(capacities[start : start + length]))
    return LayerRange(first, first + length - 1)
