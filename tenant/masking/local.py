"""`masking = "local"`: the tenant computes the effects of its pads itself."""

from collections.abc import Sequence

from torch import Tensor

from symbiosis_priv.arithmetic.keystream import Keystream
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.federation import Peer
from symbiosis_priv.limits import GroupIndex
from tenant.core.pads import EffectSource, Pad, SessionSecret, Share
from tenant.masking.backend import Simulation
from tenant.masking.scheme import Materials, SessionScheme
from tenant.worker import Worker


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

    def draw(
        self,
        index: GroupIndex,
        direction: Direction,
        rows: int,
        *,
        counts: Counts | None = None,
        ahead: bool,
        executor: Peer | None = None,
    ) -> Pad:
        first = self._burn(index, direction, rows, counts)
        keystream = self._keystream(self._seed, index, direction, counts)
        effect = self.workers[0].submit(self._effect, index, direction, keystream, first, rows, counts)
        return Pad(rows, (Share(None, keystream, first, effect),))

    def _effect(
        self,
        index: GroupIndex,
        direction: Direction,
        keystream: Keystream,
        first: int,
        rows: int,
        counts: Counts | None,
    ) -> Tensor:
        return self._products.product(index, direction, keystream.expand(first, rows), counts=counts)
