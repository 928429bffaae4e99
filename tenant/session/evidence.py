"""Evidence about a relayed answer that was refused: the blocks, as the helpers have signed them.

The executor has subtracted blocks `b_j = e_j + m_j` that the tenant has not seen. The tenant fetches them, and checks
that each is signed by its helper for this executor. An executor accepts no other blocks, and keeps the blocks of an
answer, so a block that it does not have, or that is not signed, convicts the executor. Signed blocks give the effects
that the helpers have vouched for, `e_j = b_j - m_j`, and the executor's product `y' = y + sum e_j`. Then
`tenant.core.attribution` checks both, as without relay. The id of a block commits its helper to one seed, rows and
executor (`symbiosis_priv.network.blocks`), so nobody can have an honest helper sign another matrix under that id. If
the executor is lost before it hands out the blocks, nobody is convicted. Refuted by
`tests/tenant/session/test_relay.py::test_only_liars_are_named`.
"""

import logging
from collections.abc import Callable

from torch import Tensor

from symbiosis_priv.certificates.reading import fingerprint, load_pin
from symbiosis_priv.certificates.signing import is_signed
from symbiosis_priv.errors import ProtocolError, ProviderError
from symbiosis_priv.network import wire
from symbiosis_priv.network.blocks import statement
from tenant.core.pads import Block, Share, some_rows
from tenant.core.parts import Part
from tenant.worker import Promise

log = logging.getLogger(__name__)

Fetch = Callable[[bytes, int], tuple[wire.Block, bytearray]]
"""Fetches a block from the executor, by its id and the bytes of its payload."""


def disclose(part: Part, answer: Tensor, fetch: Fetch) -> bool:
    """Replace a relayed answer by the executor's product and the effects that the helpers have signed.

    Args:
        part: a part whose relayed answer was opened and refused. Afterwards it is a part with effects.
        answer: int32 `[r, o]`, as opened; changed to the executor's product.

    Returns:
        False if the executor is at fault, because it does not have a block that its helper has signed.

    Raises:
        TransportError: the executor is lost.
    """
    effects: dict[bytes, Promise[Tensor | None]] = {}
    for first, pad in part.pads_in_place():
        for share in pad.shares:
            block = share.block
            assert block is not None
            if block.id not in effects:
                signed = _signed(part, share, block, fetch)
                if signed is None:
                    return False
                effects[block.id] = Promise()
                effects[block.id].set_result(signed - block.second.expand(share.first_row - block.start, block.rows))
        pad.shares = tuple(s._replace(effect=effects[s.block.id], offset=s.block.start) for s in pad.shares if s.block)
        rows = some_rows(answer, first, pad.rows)
        for effect in pad.effects():
            rows += effect
    part.relayed = False
    return True


def _signed(part: Part, share: Share, block: Block, fetch: Fetch) -> Tensor | None:
    """A block, int32 `[rows, o]`; None if the executor does not have what its helper has signed."""
    assert share.holder is not None
    encoding = wire.encoding_of("ring", part.rows.ring_bits)
    try:
        signed, payload = fetch(block.id, encoding.size(block.rows, part.outputs))
    except (ProviderError, ProtocolError) as error:
        log.error("%s does not have a block that it has used: %s", block.executor.name, error)
        return None
    expected = (block.id, part.index, part.direction, "ring", block.rows, part.rows.ring_bits)
    if (signed.nonce, signed.group, signed.direction, signed.arithmetic, signed.rows, signed.ring_bits) != expected:
        return None
    message = statement(signed, permit=signed.permit, executor=fingerprint(block.executor.certificate), payload=payload)
    keys = [load_pin(pin).public_key() for pin in share.holder.pins]
    if not any(is_signed(key, message, signed.signature) for key in keys):
        return None
    return encoding.unpack(payload, rows=block.rows)
