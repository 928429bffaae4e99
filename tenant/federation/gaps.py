"""Finds the gaps of a federation: layers without an executor, and pads with too few helpers. Pure functions."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from symbiosis_priv.arithmetic.ring import DIRECTIONS, Direction
from symbiosis_priv.checkpoints.layers import LayerRange, spans
from symbiosis_priv.federation import Federation, Peer


@dataclass(frozen=True)
class ServedGroups:
    """A working provider, and the layer groups that it serves in each direction."""

    peer: Peer
    groups: Mapping[Direction, range]


def find_gaps(federation: Federation, serving: Sequence[ServedGroups], layers: Sequence[int]) -> list[str]:
    """Return a message with a fix for each gap. The list is empty if providers can compute every product and every pad.

    Args:
        serving: the working providers of both roles.
        layers: the layer number of every layer group of the model (`layers.layers_of`).
    """
    executors = [s for s in serving if s.peer.role == "executor"]
    helpers = [s for s in serving if s.peer.role == "helper"]
    found = [line for direction in DIRECTIONS for line in _gaps(executors, layers, direction)]
    if not federation.helpers:
        return found
    for executor in executors:
        for direction in DIRECTIONS:
            found += _unmasked(federation, executor, helpers, layers, direction)
    return found


def layer_text(groups: Collection[int], layers: Sequence[int]) -> str:
    """Format the layers of some layer groups, such as `layers 0-3, 8`."""
    found = spans(layers[group] for group in groups)
    several = len(found) > 1 or any(span != LayerRange(span.first, span.first) for span in found)
    return f"layer{'s' * several} {', '.join(map(str, found))}"


def _gaps(executors: Sequence[ServedGroups], layers: Sequence[int], direction: Direction) -> Iterator[str]:
    served = {group for executor in executors for group in executor.groups[direction]}
    if gap := [group for group in range(len(layers)) if group not in served]:
        yield f"{layer_text(gap, layers)} {direction}: no executor; list, start or repair an executor that serves them"


def _unmasked(
    federation: Federation,
    executor: ServedGroups,
    helpers: Sequence[ServedGroups],
    layers: Sequence[int],
    direction: Direction,
) -> Iterator[str]:
    """Yield a message for each set of an executor's layer groups whose rows cannot be masked."""
    short: dict[str, list[int]] = {}
    for group in executor.groups[direction]:
        there = [helper.peer for helper in helpers if group in helper.groups[direction]]
        if want := _want(federation, executor.peer, there):
            short.setdefault(want, []).append(group)
    for want, groups in short.items():
        yield f"executor {executor.peer.name!r}, {layer_text(groups, layers)} {direction}: {want}"


def _want(federation: Federation, executor: Peer, there: Sequence[Peer]) -> str | None:
    k = federation.pad_helpers
    if k is None:
        absent = [helper.name for helper in federation.helpers if helper not in there]
        if not absent:
            return None
        others = f", or set [pads] helpers = {len(there)} to use the others only" if there else ""
        return (
            f"no pads without helper {', '.join(map(repr, absent))}: all helpers share every pad. Start or repair it"
            f"{others}"
        )
    admissible = [helper for helper in there if federation.admissible(executor, [helper])]
    companies = federation.companies_of(admissible)
    if companies >= k:
        return None
    return (
        f"helpers of {companies} companies other than its own, but [pads] helpers = {k}: start, repair or list "
        f"another helper that serves them"
    )
