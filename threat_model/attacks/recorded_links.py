"""Harvest now, decrypt later: all links are recorded, and X25519's secrets are computed years later.

The keys of TLS follow from X25519's secrets, so the recorder reads what TLS carries. What is left are seeds and effects
under the second key (`symbiosis_priv.network.hybrid`), whose ML-KEM secret the recorder does not have. The attack opens
what can be opened without it, and subtracts the pads that follow: from seeds, or from effects, of which most matrices
give the masks back. With ML-KEM's secret it reads every row.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from numpy.typing import NDArray
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import SEED_BYTES
from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.errors import ProtocolError
from symbiosis_priv.network import hybrid, wire
from threat_model.attacks.base import DirectedAttack, GuessedRows, RowsAttack
from threat_model.attacks.collusion import matching, pad_rows
from threat_model.attacks.exchanges import unstack
from threat_model.evidence.public import Public
from threat_model.evidence.views import EffectExchange, HelperView, RecordedLink, RecorderView

_CONSTANTS = (b"", bytes(32))
"""What a combiner may use in place of ML-KEM's secret, if it leaves that out."""


class Harvest(DirectedAttack[RecorderView, GuessedRows], RowsAttack[RecorderView]):
    name = "harvest now, decrypt later"
    party = "recorder"
    sees = "what TLS carried on every link, and X25519's secrets of the second key"
    source = "threat model, pad"

    def run(self, view: RecorderView, public: Public, rng: torch.Generator) -> GuessedRows | None:
        helpers = [HelperView(tuple(_opened(link))) for link in view.links]
        rows: dict[int, Tensor] = {}
        for group in sorted({e.group for e in view.executor.of(direction=self.direction)}):
            exchanges = view.executor.of(index=group, direction=self.direction)
            shift = view.executor.unused_bits
            masked = torch.cat([e.rows for e in exchanges])
            if masked.dtype == torch.int32:
                _, pads = pad_rows(helpers, public, group, self.direction)
                if not len(pads) and not shift:
                    pads = _masks_of_effects(view, public, group, self.direction)
                if len(pads):
                    masked = (masked << shift) - (pads << shift)[matching(masked << shift, pads << shift)] >> shift
            rows |= unstack(masked.double(), exchanges)
        return rows or None


def _opened(link: RecordedLink) -> Iterator[EffectExchange]:
    """The requests of a link whose seeds the recorder can read."""
    offer, answer = link.offer.share, link.answer.share
    guesses = list(_CONSTANTS) if link.kem is None else [link.kem.decapsulate(answer[:-32])]
    shared = link.curve.exchange(X25519PublicKey.from_public_bytes(answer[-32:]))
    for guess in guesses:
        secret = hybrid.combine(guess, shared, answer[-32:], offer[-32:])
        sealing = hybrid.Sealing(hybrid.connection_key(secret, link.offer, link.answer, link.finished))
        for request, payload in link.effects:
            try:
                found = request if len(request.seed) == SEED_BYTES else sealing.opened(request)
            except ProtocolError:
                break  # of all requests of the link, or of none
            where = found.group, found.direction, found.rows, found.first_row, found.seed
            yield EffectExchange(0, link.helper, *where, _matrix(request, payload))


def _masks_of_effects(view: RecorderView, public: Public, index: int, direction: Direction) -> Tensor:
    """The masks whose effects the payloads are, if they are bare: int32 `[n, d]`; no row if they are not determined."""
    weight = public.quantised(index).weight.numpy().astype(np.uint32)
    answers = [
        _matrix(request, payload)
        for link in view.links
        for request, payload in link.effects
        if (request.group, request.direction) == (index, direction) and len(payload)
    ]
    if not answers:
        return torch.empty((0, 1), dtype=torch.int32)
    effects = torch.cat(answers).numpy().view(np.uint32)
    masks = solve(weight if direction == FORWARD else weight.T, effects.T, 1 << 32)
    return torch.from_numpy(np.empty((0, 1), np.int32) if masks is None else masks.T.copy().view(np.int32))


def _matrix(request: wire.Effect, payload: bytes) -> Tensor:
    return request.encoding.unpack(bytearray(payload), rows=request.rows)


def solve(matrix: NDArray[Any], products: NDArray[Any], modulus: int) -> NDArray[Any] | None:
    """The only x `[d, r]` with `matrix @ x = products`, `[o, d]` and `[o, r]`, by elimination with unit pivots. None
    if there is none, or elimination does not find it. Arrays hold Python's integers, or uint32, which wraps."""

    def reduced(values: NDArray[Any]) -> NDArray[Any]:
        return values if values.dtype == np.uint32 else values % modulus

    left, right = reduced(matrix.copy()), reduced(products.copy())
    count = left.shape[1]
    for column in range(count):
        units = (i for i in range(column, len(left)) if math.gcd(int(left[i, column]), modulus) == 1)
        if (pivot := next(units, None)) is None:
            return None
        inverse = left.dtype.type(pow(int(left[pivot, column]), -1, modulus))
        for side in (left, right):
            side[[column, pivot]] = side[[pivot, column]]
            side[column] = reduced(side[column] * inverse)
        others = left[:, column, None].copy()
        others[column] = 0
        for side in (right, left):
            side[:] = reduced(side - others * side[column])
    return None if right[count:].any() else right[:count]
