"""`masking = "simulate"`: the ring's arithmetic on the tenant, no provider, no masks. The reference for all others."""

from __future__ import annotations

from tenant.masking.backend import Backend, RingBackend, Simulation
from tenant.masking.scheme import BackendScheme
from tenant.preparation.opening import Opening


class Simulate(BackendScheme):
    """Nothing leaves the machine, so there is nobody to hide from and no answer to verify."""

    name = "simulate"
    summary = "nobody: the same arithmetic on this machine, no providers"
    roles = frozenset()
    own_weights = True
    hides_from = frozenset({"executor", "helper", "all but a helper", "executor+helper"})
    assumption = "none"
    verified = False

    def open(self, opening: Opening) -> Backend:
        store, facts = opening.quantised()
        return RingBackend(facts, Simulation(store))
