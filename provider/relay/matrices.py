"""Makes blocks at the helper, and subtracts them from answers at the executor."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from symbiosis_priv.arithmetic.keystream import expand, relay_key
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.network import wire


def make_block(effect: memoryview, request: wire.Effect, entry: GroupEntry) -> memoryview:
    """Make the payload of the block e + m, in the encoding of the request.

    Args:
        effect: payload of e in 32 bits; not changed.
        entry: the layer group, or one expert's matrix if the request has counts.
    """
    _, outputs = entry.columns(request.direction)
    key = relay_key(request.seed, group_name=entry.name, direction=request.direction)
    block = expand(key, first_row=request.first_row, rows=request.rows, width=outputs).numpy()
    block += np.frombuffer(effect, dtype="<i4").reshape(block.shape)
    return request.encoding.pack(block)


def without_blocks(
    answer: memoryview, parts: Iterable[tuple[wire.BlockRows, memoryview]], request: wire.Execute
) -> NDArray[np.int32]:
    """Subtract rows of blocks from an answer modulo 2^32, in place if the answer can be written.

    Args:
        answer: payload of int32 `[rows, outputs]` in 32 bits.
        parts: ranges of rows, each with the whole payload of its block, in the encoding of the request.

    Returns:
        int32 `[rows, outputs]`. With narrow rings only the low bits are meaningful.
    """
    rows = np.frombuffer(answer, dtype="<i4").reshape(request.rows, -1)
    if not rows.flags.writeable:
        rows = rows.copy()
    size = request.encoding.size(1, rows.shape[1])
    for part, block in parts:
        piece = block[part.start * size : (part.start + part.rows) * size]
        request.encoding.subtract(piece, rows[part.first : part.first + part.rows])
    return rows
