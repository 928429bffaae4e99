"""The schemes without a helper, and all masking schemes by name.

`none` sends rows without a mask. With `local`, the tenant computes the effects of its pads itself. `simulate` is the
ring's arithmetic on the tenant, without providers or masks: the reference for all schemes.
"""

import logging
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import Federation
from symbiosis_priv.limits import DEFAULT_RING_BITS, RingBits
from tenant.core.masked import UNMASKED_BY_CHOICE, UnmaskedByChoice
from tenant.core.pads import EffectSource, Pad, PadOrder, SessionSecret, Share
from tenant.masking.backend import Backend, RingBackend, Simulation
from tenant.masking.lwe import Lwe
from tenant.masking.pad import OneTimePads
from tenant.masking.paper_pool import PaperPool
from tenant.masking.scheme import BackendScheme, Materials, SessionScheme
from tenant.preparation.opening import Opening
from tenant.worker import Worker

log = logging.getLogger(__name__)


class NoMasking(SessionScheme):
    """Hides nothing: every executor sees the rows. Only for providers that you trust. Bit-exact, verified."""

    name = "none"
    summary = "every executor; for providers you trust"
    roles = frozenset({"executor"})
    hides_from = frozenset()
    assumption = "you trust the executor"

    def check(self, federation: Federation, *, ring_bits: RingBits = DEFAULT_RING_BITS) -> None:
        super().check(federation, ring_bits=ring_bits)
        if federation.helpers:
            log.warning("masking = 'none': executors can read your rows; with this file's helpers, 'pad' hides them")

    def effects(self, materials: Materials) -> UnmaskedByChoice:
        return UNMASKED_BY_CHOICE


class Local(SessionScheme):
    """Hides rows from every provider without an assumption. Bit-exact, verified. The tenant multiplies as many rows as
    without providers, but ahead of time."""

    name = "local"
    summary = "no party, but the tenant needs the full checkpoint and does the providers' work ahead of time"
    roles = frozenset({"executor"})
    own_weights = True
    hides_from = frozenset({"executor", "helper", "all but a helper", "executor+helper"})
    assumption = "none"

    def effects(self, materials: Materials) -> EffectSource:
        assert materials.store is not None  # because of `own_weights`
        return LocalSource(materials.facts, materials.secret, materials.store)


class LocalSource(EffectSource):
    """Computes effects ahead of time from the tenant's own copy of the weights."""

    def __init__(self, facts: Sequence[GroupFacts], secret: SessionSecret, store: WeightStore) -> None:
        super().__init__(facts, secret)
        self._products = Simulation(store)
        self._seed = secret.seed_for("local")
        self.workers = [Worker("local-effects")]

    def draw(self, order: PadOrder) -> Pad:
        first = self._burn(order)
        keystream = self._keystream(self._seed, order.index, order.direction, order.counts)

        def effect() -> Tensor:
            masks = keystream.expand(first, order.rows)
            return self._products.product(order.index, order.direction, masks, counts=order.counts)

        return Pad(order.rows, (Share(None, keystream, first, self.workers[0].submit(effect)),))


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


AnyScheme = SessionScheme | BackendScheme

_ALL: Final[tuple[AnyScheme, ...]] = (OneTimePads(), Local(), Lwe(), NoMasking(), PaperPool(), Simulate())
_schemes: Final = {scheme.name: scheme for scheme in _ALL}


def registered() -> tuple[AnyScheme, ...]:
    """Return all schemes, which `RemoteConfig`, the threat model and the README's table know."""
    return _ALL


def scheme_named(name: str) -> AnyScheme:
    """Look up a scheme. Raises `ConfigError`, with a list of the schemes, if no scheme has this name."""
    if name not in _schemes:
        raise ConfigError(f"masking = {name!r} is unknown; choose one of {', '.join(_schemes)}")
    return _schemes[name]


def session_scheme(name: str) -> SessionScheme:
    """Look up a scheme that uses a session. Raises `ConfigError` if no such scheme has this name."""
    scheme = scheme_named(name)
    if not isinstance(scheme, SessionScheme):
        raise ConfigError(f"masking = {name!r} does not run over a session; open it with `RemoteConfig(masking=...)`")
    return scheme
