"""`masking = "pad"`: one-time pads, whose effects helpers compute from a seed.

Helper j expands its seed to a share n_j of the pad and returns the effect e_j = n_j @ W.T. The pad is n = sum n_j, its
effect e = sum e_j. The executor together with all helpers but one still sees uniform rows. The check of the product
covers every e_j. The effects of rows for experts of a stack depend on how many rows each expert has, so every helper
sees these counts, as the executor does.
"""

from collections.abc import Sequence

from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.network.hybrid import require_hybrid
from tenant.connections.helper_client import MaskRows
from tenant.core.pads import EffectSource, Pad, PadOrder, SessionSecret, Share
from tenant.masking.scheme import Holders, Materials, SessionScheme


class OneTimePads(SessionScheme):
    """Hides rows from the executor, each helper, and all of them unless all collude. Bit-exact, verified."""

    name = "pad"
    summary = "no party, unless the executor and every helper collude (default)"
    roles = frozenset({"executor", "helper"})
    hides_from = frozenset({"executor", "helper", "all but a helper"})
    assumption = "executor and helpers do not all collude"

    def effects(self, materials: Materials) -> EffectSource:
        require_hybrid("masking = 'pad'")
        return PadSource(materials.facts, materials.secret, materials.holders)


class PadSource(EffectSource):
    """Gets effects from helpers. A pad is the sum of one share for each helper that `holders` returns."""

    def __init__(self, facts: Sequence[GroupFacts], secret: SessionSecret, holders: Holders) -> None:
        super().__init__(facts, secret)
        self._holders = holders

    def draw(self, order: PadOrder) -> Pad:
        index, direction, rows, counts = order.index, order.direction, order.rows, order.counts
        helpers = self._holders(index, order.executor)
        first = self._burn(order)
        wanted, shares = MaskRows(index, direction, self._facts[index].for_rows(counts), first, rows, counts), []
        for helper in helpers:
            effect = helper.submit(wanted, ahead=order.ahead)
            shares.append(Share(helper.peer, self._keystream(helper.seed, index, direction, counts), first, effect))
        return Pad(rows, tuple(shares))
