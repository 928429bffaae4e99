"""Relayed effects: the blocks that a request names, and the effects that are fetched in place of blocks."""

import time

from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire
from tenant.core.pads import Pad, RelayedBlock, Share, in_place
from tenant.core.parts import Part


def blocks_of(pad: Pad) -> list[RelayedBlock]:
    """The block of every share, or no block if an effect is subtracted by the tenant."""
    blocks = [s.block for s in pad.shares if s.block is not None and (_is_relayed(s) or not s.effect.done())]
    return blocks if len(blocks) == len(pad.shares) else []


def blocks_at(executor: Peer, part: Part) -> tuple[wire.BlockRows, ...]:
    """The blocks of all rows of a part, if they lie at this executor or are on their way to it; else none."""
    found, now = list[wire.BlockRows](), time.monotonic()
    for first, pad in in_place(part.pads):
        blocks = blocks_of(pad)
        if not blocks or any(block.executor != executor or block.until < now for block in blocks):
            return ()
        found += [wire.BlockRows(block=b.id, start=b.start, first=first, rows=pad.rows) for b in blocks]
    return tuple(found) if len(found) <= wire.MAX_BLOCKS else ()


def fetch_effects(pad: Pad) -> None:
    """Request the effects that lie at an executor, so that they can be subtracted from an answer without blocks."""
    pad.shares = tuple(
        s._replace(effect=s.fetch(s.first_row, pad.rows), offset=0) if s.fetch and _is_relayed(s) else s
        for s in pad.shares
    )


def _is_relayed(share: Share) -> bool:
    """Returns True if the effect lies at an executor; False if that is not known yet."""
    known = share.block is not None and share.effect.done() and share.effect.exception() is None
    return known and share.effect.result() is None
