"""`masking = "pad"`: one-time pads, whose effects helpers compute from a seed.

Helper j expands its seed to a share n_j of the pad and returns the effect e_j = n_j @ W.T. The pad is n = sum n_j, its
effect e = sum e_j. The executor together with all helpers but one still sees uniform rows. The check of the product
covers every e_j. The effects of rows for experts of a stack depend on how many rows each expert has, so every helper
sees these counts, as the executor does.
"""

from collections.abc import Sequence

from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.facts import GroupFacts
from symbiosis_priv.federation import Peer
from tenant.core.pads import EffectSource, Pad, Share
from tenant.core.secret import SessionSecret
from tenant.masking.scheme import Holders, Materials, SessionScheme


class OneTimePads(SessionScheme):
    """Hides rows from the executor, from each helper, and from the executor and helpers together unless all of them
    collude. Bit-exact, verified."""

    name = "pad"
    summary = "no party, unless the executor and every helper collude (default)"
    roles = frozenset({"executor", "helper"})
    hides_from = frozenset({"executor", "helper", "all but a helper"})
    assumption = "executor and helpers do not all collude"

    def effects(self, materials: Materials) -> EffectSource:
        return PadSource(materials.facts, materials.secret, materials.holders)


class PadSource(EffectSource):
    """Gets effects from helpers. A pad is the sum of one share for each helper.

    Args:
        holders: chooses the helpers of a group's next pad.
    """

    def __init__(self, facts: Sequence[GroupFacts], secret: SessionSecret, holders: Holders) -> None:
        super().__init__(facts, secret)
        self._holders = holders

    def draw(
        self,
        index: int,
        direction: Direction,
        rows: int,
        *,
        counts: Counts | None = None,
        ahead: bool,
        executor: Peer | None = None,
    ) -> Pad:
        helpers = self._holders(index, executor)
        first = self._burn(index, direction, rows, counts)
        facts, shares = self._facts[index].for_rows(counts), []
        for helper in helpers:
            effect = helper.submit(index, direction, facts, first_row=first, rows=rows, counts=counts, ahead=ahead)
            shares.append(Share(helper.peer, self._keystream(helper.seed, index, direction, counts), first, effect))
        return Pad(rows, tuple(shares))
