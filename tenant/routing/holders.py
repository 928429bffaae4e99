"""Chooses the helpers that share a pad, if the federation sets their number. Pure functions.

The helpers belong to different companies, and all of them are admissible with an executor that may see rows under the
pad. The choice prefers helpers that have answered and whose breaker is closed; then helpers that are admissible with
more of the other executors, so that rows can move to another executor without a new pad; then helpers with a low cost.
The cost of a helper without a measurement counts as 0, so slow helpers are kept as spares.
"""

from collections.abc import Callable, Sequence

from symbiosis_priv.federation import Federation, Peer
from tenant.routing.route import Route

_USUAL_BYTES = 1 << 20  # bytes of an effect, to compare costs

Admits = Callable[[Peer, tuple[Peer, ...]], bool]
"""`Federation.admissible`, cached."""


def choose_holders(
    helpers: Sequence[Route],
    targets: Sequence[Route],
    executors: Sequence[Route],
    *,
    count: int,
    federation: Federation,
    admits: Admits,
) -> list[Route]:
    """Choose holders for the first target that has enough healthy helpers, else for the first that has enough.

    Args:
        targets: executors that may see the rows, in order of preference. Empty if no executor has answered yet; whether
            an executor may see the rows is then decided later.
        executors: executors that could take over the rows.
        federation: decides which parties are one company.
        admits: returns True if an executor may see rows under pads of these holders.

    Returns:
        The holders; fewer than `count` if there are not enough.
    """

    def order(route: Route) -> tuple[bool, bool, int, float]:
        refused = sum(not admits(executor.peer, (route.peer,)) for executor in executors)
        return not route.is_open, route.welcome is None, refused, route.health.seconds_for(_USUAL_BYTES) or 0.0

    sorted_helpers = sorted(helpers, key=order)
    most: list[Route] = []
    for target in targets or (None,):
        taken: list[Route] = []
        for route in sorted_helpers:
            if (
                len(taken) < count
                and (target is None or admits(target.peer, (route.peer,)))
                and not any(federation.one_company(route.peer, other.peer) for other in taken)
            ):
                taken.append(route)
        if len(taken) == count and all(route.is_open for route in taken):
            return taken
        if len(taken) > len(most):
            most = taken
    return most
