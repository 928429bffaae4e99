"""`masking = "pad"`: one-time pads whose effects helpers compute from a seed.

Helper j expands its seed to shares n_j and returns e_j = n_j @ W.T; n = sum n_j, e = sum e_j. The executor and all
helpers but one, pooled, still see uniform rows. The check of the product covers every e_j.
"""

from __future__ import annotations

from collections.abc import Sequence

from symbiosis_priv import wire
from symbiosis_priv.keystream import SessionSecret, mask_key
from symbiosis_priv.ring import Direction
from tenant.channel import fresh_nonce
from tenant.facts import GroupFacts
from tenant.helper import Helper
from tenant.masking.scheme import Materials, SessionScheme
from tenant.noise import EffectSource, Pad, Share


class OneTimePads(SessionScheme):
    """Hides rows from the executor, from each helper and from every proper subset of them, if at least one of
    {executor, helpers} does not collude. Bit-exact, verified."""

    name = "pad"
    summary = "nobody, unless the executor and every helper collude (default)"
    roles = frozenset({"executor", "helper"})
    hides_from = frozenset({"executor", "helper", "all but a helper"})
    assumption = "executor and helpers do not all collude"

    def effects(self, materials: Materials) -> EffectSource:
        return PadSource(materials.facts, materials.secret, materials.helpers)


class PadSource(EffectSource):
    """Effects from helpers: one-time pads in shares."""

    def __init__(self, facts: Sequence[GroupFacts], secret: SessionSecret, helpers: Sequence[Helper]) -> None:
        super().__init__(facts, secret)
        self._helpers = helpers

    def draw(self, index: int, direction: Direction, rows: int, *, ahead: bool) -> Pad:
        group, first = self._burn(index, direction, rows)
        shares = []
        for helper in self._helpers:
            request = wire.Effect(
                nonce=fresh_nonce(),
                group=index,
                direction=direction,
                arithmetic="ring",
                rows=rows,
                seed=helper.seed,
                first_row=first,
            )
            effect = helper.submit(request, outputs=self._facts[index].outputs(direction), ahead=ahead)
            key = mask_key(helper.seed, group_name=group, direction=direction)
            shares.append(Share(helper.peer, key, first, effect))
        return Pad(rows, tuple(shares))
