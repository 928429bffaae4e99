"""What is computed after the check has refused rows: corrections of wraps, and evidence about relayed answers.

Corrections. In a narrow ring, products of honest providers may leave the ring. Their rows are corrected with the
verification keys (`symbiosis_priv.arithmetic.wraps`).

Evidence. The executor of a relayed answer has subtracted blocks `b_j = e_j + m_j` that the tenant has not seen. The
tenant fetches them, and checks that each is signed by its helper for this executor. An executor accepts only blocks
that a permitted helper has signed, and keeps the blocks of an answer, so a block that it does not have, or that is not
signed, convicts the executor. Signed blocks yield the effects that the helpers have signed, `e_j = b_j - m_j`, and the
executor's product `y' = y + sum e_j`. Then `tenant.core.blame` checks both, as without relay. The id of a block commits
its helper to one seed, rows and executor (`symbiosis_priv.network.block_statement`), so an honest helper never signs
another matrix, or another number of rows, under that id.

An executor knows neither the seeds nor how many rows were ordered. So it also accepts unexpected blocks: a block of
more rows, which convicts the helper that has signed it, and a block that another helper of the tenant has signed, which
convicts no provider. No provider is convicted either if the executor is lost, or refuses for another reason than a
missing block, or if the block is too large to be fetched. Refuted by
`tests/tenant/session/test_relay.py::test_only_liars_are_named`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import torch
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from torch import Tensor

from symbiosis_priv.arithmetic import passes, wraps
from symbiosis_priv.arithmetic.modular import Column, dot
from symbiosis_priv.certificates.reading import is_signed
from symbiosis_priv.errors import ConnectionLostError, FrameTooLargeError, ProtocolError, ProviderError
from symbiosis_priv.federation import Peer
from symbiosis_priv.network import wire
from symbiosis_priv.network.block_statement import statement
from tenant.core.pads import RelayedBlock, Share, row_range, with_first_rows
from tenant.core.parts import Part, Rows
from tenant.worker import Promise

log = logging.getLogger(__name__)

_EVIDENCE_S: Final = 10.0  # time limit for all blocks; nothing else is sent meanwhile
_FEW_ROWS = 8  # more rows than this do not leave a ring by chance at two entries
_ENTRIES = 1 << 22  # of the rows that are copied and corrected together


class ProductRefused(Protocol):
    """`failover.Attempts.refused`, for one answer."""

    def __call__(self, *, may_wrap: bool) -> bool:
        """Find the provider at fault. Returns False if `may_wrap` is True and there is none."""


def correct_or_blame(
    part: Part, answer: Tensor, refused: Sequence[int], product_refused: ProductRefused
) -> Sequence[int] | None:
    """Handle rows that failed the check. `answer`: int32 `[r, o]`, the answer that was opened. `refused`: the numbers
    of the rows, at least one. Returns the rows that left a narrow ring too often to be corrected; None if a provider
    was at fault and the part has to be sent again."""
    # rows of zeros cannot leave a narrow ring
    may_wrap = part.rows.most_wraps > 0 and part.start + max(refused) < part.rows.count
    # an outlier channel may wrap in all rows, but few rows wrap at two entries, and to look for them takes long
    left = correct(part, refused, answer, entries=1) if may_wrap else refused
    suspicious = not may_wrap or len(left) > _FEW_ROWS
    if suspicious and product_refused(may_wrap=may_wrap):
        return None
    left = correct(part, left, answer)
    return None if left and not suspicious and product_refused(may_wrap=may_wrap) else left


def correct(part: Part, rows: Sequence[int], answer: Tensor, *, entries: int = wraps.MOST_ENTRIES) -> Sequence[int]:
    """Correct the wraps of rows that failed the check, and write their results. A search for one wrapped entry takes
    microseconds a row, a search for two entries tens of milliseconds. `answer`: int32 `[r, o]`, the answer that was
    opened. `entries`: the maximum number of wrapped entries to look for in a row. Returns the numbers of the rows that
    cannot be corrected."""
    if not rows:
        return []
    bits, left = part.rows.ring_bits, list[int]()
    corrector = wraps.Corrector(part.plan.column, ring_bits=bits, most=part.rows.most_wraps)
    look, step = _one_entry if entries == 1 else _two_entries, max(1, _ENTRIES // part.outputs)
    for product in part.opened(answer):
        first = product.start - part.start
        numbers = [row for row in rows if first <= row < first + product.answer.shape[0]]
        for start in range(0, len(numbers), step):
            some = numbers[start : start + step]
            places = [number - first for number in some]
            y = passes.unmask(product.answer[places], [effect[places] for effect in product.effects], ring_bits=bits)
            left += look(part, corrector, some, y)
    return left


def _one_entry(part: Part, corrector: wraps.Corrector, numbers: Sequence[int], y: Tensor) -> list[int]:
    found, products = corrector.one_entry(y, part.expected[list(numbers)])
    if not found:
        return list(numbers)
    rows = [numbers[place] for place in found]
    some, second, residues = _second(part, rows)
    if not torch.equal(dot(products, second), residues):  # the search for two entries tries other explanations
        return list(numbers)
    return sorted({*numbers}.difference(rows).union(part.put(rows, some, products)))


def _two_entries(part: Part, corrector: wraps.Corrector, numbers: Sequence[int], y: Tensor) -> list[int]:
    left = []
    for number, residues in zip(numbers, y, strict=True):
        one, second, residue = _second(part, [number])
        t = corrector.corrected(residues, int(part.expected[number]), (second, int(residue)))
        if t is None or part.put([number], one, t[None]):
            left.append(number)
    return left


def _second(part: Part, rows: Sequence[int]) -> tuple[Rows, Column, Tensor]:
    """Encode rows. Returns them, the second column, and the residues of the true products, int64 `[n]`."""
    r, v = part.plan.second()
    some = part.rows.selected([part.start + row for row in rows])
    residues = torch.empty(len(rows), dtype=torch.int64, device="cpu")
    some.encode(torch.empty((len(rows), part.plan.inputs), dtype=torch.int32, device="cpu"), v=v, expected=residues)
    return some, r, residues


class Fetch(Protocol):
    """Fetches a block from the executor."""

    def __call__(self, block_id: bytes, size: int, *, deadline: float) -> tuple[wire.Block, bytearray]:
        """Return the block and its payload, which has `size` bytes unless the helper has sent another number of
        bytes."""


Signer = Callable[[str], tuple[Peer, PublicKeyTypes] | None]
"""Returns the helper whose certificate has this `fingerprint`, and the certificate's key; None if there is none."""


def restore_product(part: Part, answer: Tensor, fetch: Fetch, signer: Signer) -> Peer | None:
    """Replace a relayed answer by the executor's product and the effects that the helpers have signed. `part`: a part
    whose relayed answer was opened and refused. Afterwards its effects are there, and none is relayed. `answer`: int32
    `[r, o]`, as opened; overwritten with the executor's product. Returns the provider at fault if a block shows a
    fault: the executor, if it lacks a signed block, or a helper that has signed another number of rows. Otherwise
    None. Raises `TransportError`: a block could not be fetched."""
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
    if share.holder is None or helper is None or helper.name != share.holder.name:
        raise ConnectionLostError(f"a block for {block.executor.name} is signed by a helper that was not asked for it")
    expected = (part.index, part.direction, "ring", block.rows, part.rows.ring_bits)
    if (signed.group, signed.direction, signed.arithmetic, signed.rows, signed.ring_bits) != expected:
        return share.holder
    if len(payload) != size:
        return block.executor
    return encoding.unpack(payload, rows=block.rows)
