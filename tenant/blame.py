"""Who lied, once a product has been refused: the answer is wrong, or an effect is."""

from __future__ import annotations

import functools
import logging

from safetensors import SafetensorError
from torch import Tensor

from symbiosis_priv.federation import Peer
from symbiosis_priv.keystream import expand
from tenant.facts import Preparation
from tenant.parts import Part

log = logging.getLogger(__name__)


def liars(preparation: Preparation, executor: Peer, part: Part, answer: Tensor) -> list[Peer]:
    """Those whose answer or effect is not the product modulo 2^32; nobody if that cannot be told.

    Args:
        executor: who gave the answer.
        part: what it was asked; its effects are there.
        answer: int32 `[r, o]`, refused.
    """
    others = [(pad, share) for pad in part.pads for share in pad.shares if share.holder is not None]
    if not others:
        return [executor]
    accepts = functools.partial(preparation.blame.accepts, part.index, part.direction)
    width = part.sent.shape[1]
    found: list[Peer] = []
    try:
        if not accepts(rows=part.sent, answer=answer):
            found.append(executor)
        for pad, share in others:
            assert share.holder is not None
            mask = expand(share.key, first_row=share.first_row, rows=pad.rows, width=width)
            if not accepts(rows=mask, answer=share.rows_of_effect(pad.rows)):
                found.append(share.holder)
    except (OSError, SafetensorError) as error:
        log.error("cannot read the keys that say who lied: %s", error)
    return found
