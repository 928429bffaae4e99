"""A block of relayed effects: its id, and the statement that its helper signs.

The id is derived from the seed and from everything that determines the block. So a helper that signs an id has agreed
to one matrix only. If tenants chose ids, an executor could order another matrix under the same id, together with
another tenant, and would have the helper's signature of it.

The signature is evidence between the parties: an executor accepts no block without it, and a tenant that finds a wrong
row tests the block against it. So the statement names everything that decides which matrix the block must be: rows and
layer group, the tenant's permit at the executor, and the executor itself. A block for one executor or tenant is no
evidence about another one.
"""

import hashlib
from typing import Final

import msgspec

from symbiosis_priv.arithmetic.keystream import derive
from symbiosis_priv.network import wire

_DOMAIN: Final = b"symbiosis-priv block 1\0"
_ID_BYTES: Final = 16
_encoder = msgspec.msgpack.Encoder()


def block_id(effect: wire.Effect) -> bytes:
    """The id of the block that an effect with a relay orders. Tenant and helper compute it."""
    assert effect.relay is not None
    counts = "" if effect.counts is None else ",".join(["counts", *map(str, effect.counts)])
    terms = (effect.group, effect.direction, effect.first_row, effect.rows, counts, effect.ring_bits)
    return derive(effect.seed, "block", *map(str, terms), effect.relay.executor)[:_ID_BYTES]


def statement(block: wire.Binding, *, permit: bytes, executor: str, payload: wire.Buffer) -> bytes:
    """The message that a helper signs for a block (`certificates.signing`), of which the nonce is the block's id.
    `permit` is the tenant's at the executor, `executor` the `fingerprint` of its certificate. The message has the
    SHA-256 of the payload."""
    digest = hashlib.sha256(payload).digest()
    terms = (block.nonce, block.group, block.direction, block.arithmetic, block.rows, block.counts, block.ring_bits)
    return _DOMAIN + _encoder.encode((*terms, permit, executor, digest))
