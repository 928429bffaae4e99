"""`masking = "pad"`: one-time pads whose effects helpers compute from a seed.

Helper j expands its seed to shares n_j and returns e_j = n_j @ W.T; n = sum n_j, e = sum e_j. The executor and all
helpers but one, pooled, still see uniform rows. Every e_j is verified before it is used.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from torch import Tensor

from symbiosis_priv import wire
from symbiosis_priv.errors import ProtocolError, VerificationError
from symbiosis_priv.keystream import SessionSecret, expand, mask_key
from symbiosis_priv.ring import Direction
from tenant.channel import fresh_nonce
from tenant.facts import GroupFacts
from tenant.helper import Helper
from tenant.masking.scheme import Materials, SessionScheme
from tenant.noise import EffectSource, Pad
from tenant.verifier import VerificationKeys
from tenant.worker import Worker


class OneTimePads(SessionScheme):
    """Hides rows from the executor, from each helper and from every proper subset of them, if at least one of
    {executor, helpers} does not collude. Bit-exact, verified."""

    name = "pad"
    summary = "nobody, unless the executor and every helper collude (default)"
    roles = frozenset({"executor", "helper"})
    hides_from = frozenset({"executor", "helper", "all but a helper"})
    assumption = "executor and helpers do not all collude"

    def effects(self, materials: Materials) -> EffectSource:
        return PadSource(materials.facts, materials.secret, materials.helpers, materials.keys)


class PadSource(EffectSource):
    """Effects from helpers: one-time pads in shares, every one verified before it is used."""

    def __init__(
        self,
        facts: Sequence[GroupFacts],
        secret: SessionSecret,
        helpers: Sequence[Helper],
        keys: VerificationKeys,
    ) -> None:
        super().__init__(facts, secret)
        self._helpers = helpers
        self._keys = keys
        self.workers = [Worker("effects-join") for _ in range(2)]
        self._count = threading.Lock()  # both joiners count

    def draw(self, index: int, direction: Direction, rows: int, *, ahead: bool) -> Pad:
        group, first = self._burn(index, direction, rows)
        facts = self._facts[index]
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
            effect = helper.submit(request, outputs=facts.outputs(direction), ahead=ahead)
            key = mask_key(helper.seed, group_name=group, direction=direction)  # while the helper does the same
            share = expand(key, first_row=first, rows=rows, width=facts.inputs(direction))
            shares.append((helper, share, effect))
        mask = shares[0][1]
        for _, share, _ in shares[1:]:
            mask = mask + share
        return Pad(mask, self.workers[ahead].submit(self._join, index, direction, shares))

    def _join(self, index: int, direction: Direction, shares: list[tuple[Helper, Tensor, Future[Tensor]]]) -> Tensor:
        total: Tensor | None = None
        for helper, share, answer in shares:
            try:
                effect = answer.result()  # bounded by the channel's deadline
            except ProtocolError as error:
                raise self._lie(helper, index, direction) from error
            if not self._keys.accepts(index, direction, rows=share, answer=effect):
                raise self._lie(helper, index, direction)
            total = effect if total is None else total.add_(effect)
        assert total is not None  # PadSource is only made with helpers
        with self._count:
            self.verified += total.shape[0]
        return total

    def _lie(self, helper: Helper, index: int, direction: Direction) -> VerificationError:
        group = self._facts[index].entry.name
        return VerificationError(provider=helper.peer.name, group_name=group, direction=direction, what="an effect")
