"""Evidence about a relayed answer that was refused: the blocks, as the helpers have signed them.

The executor has subtracted blocks `b_j = e_j + m_j` that the tenant has not seen. The tenant fetches them, and checks
that each is signed by its helper for this executor. An executor accepts only blocks that a permitted helper has signed,
and keeps the blocks of an answer, so a block that it does not have, or that is not signed, convicts the executor.
Signed blocks yield the effects that the helpers have signed, `e_j = b_j - m_j`, and the executor's product `y' = y +
sum e_j`. Then `tenant.core.blame` checks both, as without relay. The id of a block commits its helper to one seed, rows
and executor (`symbiosis_priv.network.block_statement`), so an honest helper never signs another matrix, or another
number of rows, under that id.

An executor knows neither the seeds nor how many rows were ordered. So it also accepts unexpected blocks: a block of
more rows, which convicts the helper that has signed it, and a block that another helper of the tenant has signed, which
convicts no provider. No provider is convicted either if the executor is lost, or refuses for another reason than a
missing block, or if the block is too large to be fetched. Refuted by
`tests/tenant/session/test_relay.py::test_only_liars_are_named`.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from torch import Tensor

from symbiosis_priv.certificates.signing import is_signed
from symbiosis_priv.errors import ConnectionLostError, FrameTooLargeError, ProtocolError, ProviderError
from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire
from symbiosis_priv.network.block_statement import statement
from tenant.core.pads import RelayedBlock, Share, row_range, with_first_rows
from tenant.core.parts import Part
from tenant.worker import Promise

log = logging.getLogger(__name__)

_EVIDENCE_S: Final = 10.0  # time limit for all blocks; nothing else is sent meanwhile


class Fetch(Protocol):
    """Fetches a block from the executor."""

    def __call__(self, block_id: bytes, size: int, *, deadline: float) -> tuple[wire.Block, bytearray]:
        """Return the block and its payload, which has `size` bytes unless the helper has sent another number of
        bytes."""


Signer = Callable[[str], tuple[Peer, PublicKeyTypes] | None]
"""Returns the helper whose certificate has this `fingerprint`, and the certificate's key; None if there is none."""


def restore_product(part: Part, answer: Tensor, fetch: Fetch, signer: Signer) -> Peer | None:
    """Replace a relayed answer by the executor's product and the effects that the helpers have signed.

    Args:
        part: a part whose relayed answer was opened and refused. Afterwards its effects are there, and none is relayed.
        answer: int32 `[r, o]`, as opened; overwritten with the executor's product.

    Returns:
        The provider at fault if a block shows a fault: the executor, if it lacks a signed block, or a helper that has
            signed another number of rows. Otherwise None.

    Raises:
        TransportError: a block could not be fetched.
    """
    effects: dict[bytes, Promise[Tensor | None]] = {}
    until = time.monotonic() + _EVIDENCE_S
    for first, pad in with_first_rows(part.pads):
        for share in pad.shares:
            block = share.block
            assert block is not None
            if block.id not in effects:
                signed = _signed(part, share, block, partial(fetch, deadline=until), signer)
                if isinstance(signed, Peer):
                    return signed
                effects[block.id] = Promise()
                effects[block.id].set_result(signed - block.second.expand(share.first_row - block.start, block.rows))
        pad.shares = tuple(s._replace(effect=effects[s.block.id], offset=s.block.start) for s in pad.shares if s.block)
        rows = row_range(answer, first, pad.rows)
        for effect in pad.effects():
            rows += effect
    part.relayed = False
    return None


def _signed(
    part: Part,
    share: Share,
    block: RelayedBlock,
    fetch: Callable[[bytes, int], tuple[wire.Block, bytearray]],
    signer: Signer,
) -> Tensor | Peer:
    """Return a block, int32 `[rows, o]`, or the provider at fault. Raises `TransportError` as `restore_product`."""
    encoding = wire.encoding_of("ring", part.rows.ring_bits)
    size = encoding.size(block.rows, part.outputs)
    try:
        signed, payload = fetch(block.id, size)
    except (ProviderError, ProtocolError) as error:
        refused = isinstance(error, ProviderError) and error.code != wire.ErrorCode.REFUSED
        if refused or isinstance(error, FrameTooLargeError):
            raise ConnectionLostError(f"{block.executor.name} does not return a block: {error}") from error
        log.error("%s does not have a block that it has used: %s", block.executor.name, error)
        return block.executor
    message = statement(signed, permit=signed.permit, executor=block.certificate, payload=payload)
    helper, key = signer(signed.helper) or (None, None)
    if signed.nonce != block.id or key is None or not is_signed(key, message, signed.signature):
        return block.executor
    # not proof of a fault: a helper that is also a tenant can order a block from another helper
    if helper != share.holder:
        raise ConnectionLostError(f"a block for {block.executor.name} is signed by a helper that was not asked for it")
    expected = (part.index, part.direction, "ring", block.rows, part.rows.ring_bits)
    if (signed.group, signed.direction, signed.arithmetic, signed.rows, signed.ring_bits) != expected:
        assert helper is not None
        return helper
    if len(payload) != size:
        return block.executor
    return encoding.unpack(payload, rows=block.rows)
