"""The statement that a helper signs for a block of relayed effects.

The signature is evidence between the parties: an executor accepts no block without it, and a tenant that finds a wrong
row tests the block against it. So the statement names everything that decides which matrix the block must be: rows and
layer group, the tenant's permit at the executor, and the executor itself. A block for one executor or tenant is no
evidence about another one.
"""

import hashlib
from typing import Final

import msgspec

from symbiosis_priv.network import wire

_DOMAIN: Final = b"symbiosis-priv block 1\0"
_encoder = msgspec.msgpack.Encoder()


def statement(block: wire.Binding, *, permit: bytes, executor: str, payload: wire.Buffer) -> bytes:
    """The message that the helper signs (`certificates.signing`).

    Args:
        block: the binding of the block; its nonce is the block's id.
        permit: token of the tenant's permit.
        executor: `fingerprint` of the executor's certificate.
        payload: the block's matrix in its encoding.
    """
    digest = hashlib.sha256(payload).digest()
    terms = (block.nonce, block.group, block.direction, block.arithmetic, block.rows, block.counts, block.ring_bits)
    return _DOMAIN + _encoder.encode((*terms, permit, executor, digest))
