"""Fault attribution: finds whose result was wrong, after the check has refused a product.

A refused product y = y' - sum e_j means that the answer y' or an effect e_j is wrong modulo 2^32, but not which one.
`attribute` checks each of them separately with the blame keys: m secret columns over Z_2^32. An error of 2-adic
valuation v passes m uniform columns with probability 2^-(32-v)m. For v >= 30 that is not negligible, so it can happen
that no provider is convicted. Then all providers that took part are suspects, and the wrong result is not used. All of
R is secret and uniform: small or sparse columns could be learned by probing. An effect that the tenant computed itself
is checked as well: damage to the tenant's own packed weights must not convict a provider.

Narrow rings. Answers and effects are residues modulo 2^w. An honest party's residues satisfy the equation of the blame
keys modulo 2^w, because reduction modulo 2^w is a ring homomorphism of Z_2^32: an honest party is never
convicted. An error of valuation v < w passes m columns with probability 2^-(w-v)m, as above with w in place of 32.
Products may leave a narrow ring, so a row that fails the check does not prove a lie: its wraps are corrected
(`symbiosis_priv.arithmetic.wraps`). If they cannot be corrected, and the blame keys find no error, no provider is
suspected, and the row is multiplied again at half its scale. At the smallest scale no product leaves the ring.
"""

import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Self

import torch
from safetensors import SafetensorError
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import SEED_BYTES, StreamKey, derive, expand
from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction, opposite
from symbiosis_priv.arithmetic.segments import Counts, segments
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.federation import Peer
from symbiosis_priv.kernels import RingMatrix
from symbiosis_priv.limits import DEFAULT_RING_BITS, GroupIndex, RingBits
from tenant.core.pads import with_first_rows
from tenant.core.parts import Part
from tenant.core.verifier import Place

log = logging.getLogger(__name__)

DEFAULT_COLUMNS = 16
_BLOCK = 1 << 19  # weights per block, which stay in the cache

Stacks = Mapping[GroupIndex, Callable[[], RingMatrix]]
"""Functions that read a stack of experts from the checkpoint, by group index."""
NO_STACKS: Final[Stacks] = {}


class BlameKeys:
    """R and V modulo 2^32 for every (layer group, direction), with m columns. Secret, like `VerificationKeys`. The many
    V of a stack of experts are not stored, but computed from the checkpoint when a row was refused. `secret`: 32 bytes,
    from which R is expanded. `read`: reads V, int32 `[w, m]` for rows of width w; by default from `products`."""

    def __init__(
        self,
        secret: bytes,
        *,
        columns: int = DEFAULT_COLUMNS,
        read: Callable[[Place], Tensor] | None = None,
        stacks: Stacks = NO_STACKS,
    ) -> None:
        self.secret = secret
        self.products: dict[Place, Tensor] = {}
        self._columns, self._read, self._stacks = columns, read or self.products.__getitem__, stacks

    @classmethod
    def fresh(cls, *, columns: int = DEFAULT_COLUMNS, stacks: Stacks = NO_STACKS) -> Self:
        """New keys from the operating system's generator."""
        return cls(secrets.token_bytes(SEED_BYTES), columns=columns, stacks=stacks)

    def add(self, index: GroupIndex, weight: Tensor, *, weight_bits: int) -> None:
        """Make the keys of one linear from its quantised weight, int16 `[o, d]`."""
        outputs, inputs = weight.shape
        down = self._expand(index, FORWARD, rows=outputs).t().contiguous()
        up = self._expand(index, BACKWARD, rows=inputs).t().contiguous()
        to_inputs = torch.zeros((self._columns, inputs), dtype=torch.int32, device="cpu")
        to_outputs = torch.empty((outputs, self._columns), dtype=torch.int32, device="cpu")
        step = max(1, _BLOCK // max(1, inputs))
        for start in range(0, outputs, step):  # packing the whole weight would take more memory, and so more time
            part = slice(start, start + step)
            matrix = RingMatrix(weight[part], weight_bits=weight_bits)
            to_inputs += matrix.product(down[:, part], BACKWARD)
            to_outputs[part] = matrix.product(up).t()
        self.products[index, FORWARD] = to_inputs.t().contiguous()
        self.products[index, BACKWARD] = to_outputs

    def accepts(
        self,
        index: GroupIndex,
        direction: Direction,
        *,
        rows: Tensor,
        answer: Tensor,
        counts: Counts | None = None,
        ring_bits: RingBits = DEFAULT_RING_BITS,
    ) -> bool:
        """Returns True if `answer` is the product of `rows` modulo 2^ring_bits. `rows`: int32 `[r, d]`, as sent to the
        executor or as expanded from a seed. `answer`: int32 `[r, o]`, as received. Raises `CheckpointError`: the stack
        cannot be read from the checkpoint."""
        stack = self._stacks[index]() if index in self._stacks else None
        if stack is None:
            stored = self._read((index, direction)).t().contiguous()
            widths = stored.shape[1], len(self._read((index, opposite(direction))))
        else:
            widths = stack.columns(direction, by_expert=counts is not None)
        if answer.dtype != torch.int32 or answer.shape != (len(rows), widths[1]) or rows.shape[1] != widths[0]:
            return False
        r = self._expand(index, direction, rows=widths[1]).t().contiguous()
        for expert, segment in [(0, slice(None))] if counts is None else segments(counts):
            alone = None if counts is None else tuple(len(r) * (other == expert) for other in range(len(counts)))
            v = stored if stack is None else stack.product(r, opposite(direction), counts=alone)
            # 2 to 3 times as fast as `answer @ r` and `rows @ v`
            difference = r @ answer[segment].t() - v @ rows[segment].t()
            if bool((difference << DEFAULT_RING_BITS - ring_bits).any()):
                return False
        return True

    def __repr__(self) -> str:
        return f"BlameKeys({self._columns} columns)"

    def _expand(self, index: GroupIndex, direction: Direction, *, rows: int) -> Tensor:
        key = derive(self.secret, "verify", str(index), direction)
        return expand(StreamKey(key), first_row=0, rows=rows, width=self._columns)


def attribute(blame: BlameKeys, executor: Peer, part: Part, answer: Tensor) -> tuple[list[Peer], bool]:
    """Check the answer and every effect of a refused product. `answer`: int32 `[r, o]`, refused. Returns the providers
    whose result is not the product in the ring, and True if an effect that the tenant computed itself is not. No
    provider if the keys detect no error, or cannot be read (a stack without its checkpoint)."""

    def is_product(first: int, rows: Tensor, result: Tensor) -> bool:
        counts, bits = part.counts_of(first, rows.shape[0]), part.rows.ring_bits
        return blame.accepts(part.index, part.direction, rows=rows, answer=result, counts=counts, ring_bits=bits)

    found, own = list[Peer](), False
    try:
        if not is_product(0, part.sent.masked_words, answer):
            found.append(executor)
        for first, pad in with_first_rows(part.pads):
            holders = pad.wrong_effects(partial(is_product, first))
            own = own or None in holders
            found += [holder for holder in holders if holder is not None]
    except (OSError, SafetensorError, CheckpointError) as error:
        log.error("cannot read the keys that tell whose result is wrong: %s", error)
    return found, own
