"""The fast lane of few rows: requests that differ from an earlier one of the connection in nonce and rows only.

Parsing, checking and queueing a request of one row takes longer than its product (docs/adr/9-lane.md). So a `Repeated`
keeps what the usual way (`connection`) has learned from a header. Model, layers and limits do not change while a
connection lasts: an equal header needs no second check.

A header is equal if all its bytes are, but for the nonce. The bytes are those of `wire.encode`, in which the nonce of a
plain request has one place (`test_a_header_that_differs_in_its_nonce_only_is_the_same_request`). A tenant that encodes
otherwise is served the usual way. What may change between two requests is checked for every request: certificate,
executor, bill, quota, stage, and whose turn it is. If one of these is not as usual, the request is served the usual
way, from its first byte on.
"""

from typing import Final, NamedTuple, Self

from provider.executor.queues import RepeatedProduct
from provider.gateway.usage import UsageCounts
from symbiosis_priv.network import wire

_PREFIX: Final = wire.PREFIX.size
_NONCE: Final = bytes(range(wire.NONCE_BYTES))
_LIKE: Final = wire.Execute(nonce=_NONCE, group=0, direction="forward", arithmetic="ring", rows=1)
_START: Final = wire.encode(_LIKE).index(_NONCE)
"""Where the nonce of a request begins, in a frame by `wire.encode`."""
_END: Final = _START + wire.NONCE_BYTES
_MOST: Final = 255
"""The largest prefix and header that are kept. Longer ones have counts, which change."""


class Repeated(NamedTuple):
    """Requests like one that the usual way has answered."""

    like: wire.Execute  # the answered request
    head: int  # bytes of prefix and header
    size: int  # and of the payload
    before: bytes  # prefix and header of the usual answer, up to the nonce
    after: bytes  # and from there on
    counts: UsageCounts  # the bill of one answered request
    product: RepeatedProduct

    @classmethod
    def of(cls, like: wire.Execute, counts: UsageCounts, product: RepeatedProduct) -> tuple[bytes, Self] | None:
        """The key of such requests, and what they have in common. None if their header is too long."""
        head = wire.encode(like, payload_bytes=counts.bytes_received)
        if len(head) > _MOST or (parts := parts_of(head)) is None:
            return None
        result = wire.encode(wire.Result.answering(like), payload_bytes=counts.bytes_sent)
        before, _, after = result.partition(like.nonce)
        return parts[0], cls(like, len(head), len(head) + counts.bytes_received, before, after, counts, product)


def parts_of(frame: wire.Buffer) -> tuple[bytes, bytes] | None:
    """The bytes of a frame's prefix and header without the nonce, which are its key, and the nonce. None for a header
    that has not arrived, or is too long; others that are too long have a key like no kept one. `frame` has the bytes
    that have arrived, from the prefix on."""
    head = bytes(frame[:_MOST])
    if len(head) < _END or not _END <= (size := _PREFIX + head[4]) <= len(head):
        return None
    return head[:_START] + head[_END:size], head[_START:_END]
