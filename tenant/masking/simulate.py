"""`masking = "simulate"`: the ring's arithmetic on the tenant, without providers or masks. The reference for all
schemes."""

from tenant.masking.backend import Backend, RingBackend, Simulation
from tenant.masking.scheme import BackendScheme
from tenant.preparation.opening import Opening


class Simulate(BackendScheme):
    """Sends nothing, so no provider could read rows, and there is no answer to verify."""

    name = "simulate"
    summary = "no party: the same arithmetic on this machine, no providers"
    roles = frozenset()
    own_weights = True
    hides_from = frozenset({"executor", "helper", "all but a helper", "executor+helper"})
    assumption = "none"
    verified = False

    def open(self, opening: Opening) -> Backend:
        store, facts = opening.quantised()
        return RingBackend([group.narrowed(opening.ring_bits) for group in facts], Simulation(store))
