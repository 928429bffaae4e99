"""Relayed effects: finds the blocks that a request names, and fetches effects in place of blocks."""

import time

from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire
from tenant.core.pads import Pad, RelayedBlock, Share, with_first_rows
from tenant.core.parts import Part


def blocks_of(pad: Pad) -> list[RelayedBlock]:
    """Return the block of every share; none unless every effect was or will be relayed."""
    blocks = [s.block for s in pad.shares if s.block is not None and (_is_relayed(s) or not s.effect.done())]
    return blocks if len(blocks) == len(pad.shares) else []


def blocks_at(executor: Peer, part: Part) -> tuple[wire.BlockRows, ...]:
    """Return the blocks of all rows of a part; none unless every block was sent to this executor."""
    found, now = list[wire.BlockRows](), time.monotonic()
    for first, pad in with_first_rows(part.pads):
        blocks = blocks_of(pad)
        if not blocks or any(block.executor != executor or block.until < now for block in blocks):
            return ()
        found += [wire.BlockRows(block=b.id, start=b.start, first=first, rows=pad.rows) for b in blocks]
    return tuple(found) if len(found) <= wire.MAX_BLOCKS else ()


def fetch_effects(pad: Pad) -> None:
    """Request the effects that were relayed, so that the tenant can subtract them itself."""
    pad.shares = tuple(
        s._replace(effect=s.fetch(s.first_row, pad.rows), offset=0) if s.fetch and _is_relayed(s) else s
        for s in pad.shares
    )


def _is_relayed(share: Share) -> bool:
    """Returns True if the effect was relayed; False if that is not known yet."""
    known = share.block is not None and share.effect.done() and share.effect.exception() is None
    return known and share.effect.result() is None
