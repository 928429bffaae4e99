"""Fault attribution: finds whose result was wrong, after the check has refused a product.

A refused product y = y' - sum e_j means that the answer y' or an effect e_j is wrong, but not which one. The blame keys
check each of them separately (`verifier`). An effect that the tenant computed itself is checked as well: damage to the
tenant's own packed weights must not convict a provider.

A relayed answer is first replaced by the executor's product and the effects that the helpers have signed
(`tenant.session.evidence`).
"""

import logging
from functools import partial
from typing import NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.federation import Peer
from tenant.core.parts import Part
from tenant.core.verifier import BlameKeys

log = logging.getLogger(__name__)


class Attribution(NamedTuple):
    """The parties whose result is not the product in the ring.

    Args:
        providers: providers whose answer or effect is wrong.
        own: True if an effect that the tenant computed itself is wrong.
    """

    providers: list[Peer]
    own: bool


def attribute(blame: BlameKeys, executor: Peer, part: Part, answer: Tensor) -> Attribution:
    """Check the answer and every effect of a refused product. The result is empty if the keys detect no error.

    Args:
        executor: the provider of the answer.
        part: the part that was sent to the executor; its effects have arrived.
        answer: int32 `[r, o]`, refused.
    """

    def accepts(first: int, rows: Tensor, result: Tensor) -> bool:
        counts = part.counts_of(first, rows.shape[0])
        return blame.accepts(
            part.index, part.direction, rows=rows, answer=result, counts=counts, ring_bits=part.rows.ring_bits
        )

    found: list[Peer] = []
    own = False
    try:
        if not accepts(0, part.sent.masked_words, answer):
            found.append(executor)
        for first, pad in part.pads_in_place():
            for holder in pad.wrong_effects(partial(accepts, first)):
                if holder is None:
                    own = True
                else:
                    found.append(holder)
    except (OSError, SafetensorError, CheckpointError) as error:
        log.error("cannot read the keys that tell whose result is wrong: %s", error)
    return Attribution(found, own)
