"""Which helpers share a pad, if the federation says how many do. Pure.

They are as many helpers of as many companies, all of them admissible with an executor that may then see rows under the
pad. Preferred are those whose breakers are closed and who have been heard, then those with which more of the other
executors are admissible, so that rows can move on without a new pad, then those that cost least. Who has not been
measured yet costs nothing, so whoever is slow, whether for little or for much, is left for a spare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from symbiosis_priv.federation import Federation, Peer
from tenant.routing.route import Route

_USUAL_BYTES = 1 << 20  # of an effect, to compare costs by

Admits = Callable[[Peer, tuple[Peer, ...]], bool]
"""`Federation.admissible`, remembered."""


def choose_holders(
    helpers: Sequence[Route],
    targets: Sequence[Route],
    executors: Sequence[Route],
    *,
    count: int,
    federation: Federation,
    admits: Admits,
) -> list[Route]:
    """Holders for the first target that has enough healthy ones; else for the first that has enough; else too few.

    Args:
        helpers: that may be taken.
        targets: executors that may see the rows, the best first; none if there is nobody yet, and whoever comes will
            be compared with the holders then.
        executors: that could take the rows over.
        count: helpers of a pad.
        federation: knows who is one company.
        admits: whether an executor may see rows under pads of these holders.
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
