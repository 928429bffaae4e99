"""The fast lane of few rows: requests that differ from an earlier one of the connection in nonce and rows only.

Decoding sends one row per request, and parsing, checking and queueing a request takes longer than its product. After
the usual way (`connection`) has answered a request of few rows, a `Repeated` keeps what was learned from its header:
model, layers and limits do not change while a connection lasts, so an equal header needs no second check.

A header is equal if all its bytes are, but for the nonce. The bytes are those of `wire.encode`, in which the nonce of a
plain request has one place (`test_a_header_that_differs_in_its_nonce_only_is_the_same_request`). A tenant that encodes
otherwise is served the usual way. What may change between two requests is checked for every request, here as there, by
the same code: certificate, stop, executor, bill, quota, bytes in flight, stage, and whose turn it is.
"""

import sys
from dataclasses import dataclass
from typing import Final

import msgspec

from provider.executor.queues import RepeatedProduct
from provider.gateway.admission import Sizes
from provider.gateway.usage import UsageCounts
from symbiosis_priv.network import wire

_PREFIX: Final = wire.PREFIX.size
_NONCE: Final = bytes(range(wire.NONCE_BYTES))
_LIKE: Final = wire.Execute(nonce=_NONCE, group=0, direction="forward", arithmetic="ring", rows=1)
_START: Final = wire.encode(_LIKE).index(_NONCE)
"""Where the nonce of a request begins, in a frame by `wire.encode`."""
_END: Final = _START + wire.NONCE_BYTES
_MOST_HEADER: Final = 255
"""The largest header that is kept. Longer ones have counts or blocks, which change."""


@dataclass(frozen=True)
class Repeated:
    """Requests like one that the usual way has answered.

    Args:
        like: the answered request.
        head: bytes of prefix and header.
        answer: prefix and header of the usual answer, before and after the nonce.
        counts: the bill of one answered request.
        product: computes the product at once.
    """

    like: wire.Execute
    head: int
    sizes: Sizes
    answer: tuple[bytes, bytes]
    counts: UsageCounts
    product: RepeatedProduct

    @classmethod
    def of(cls, like: wire.Execute, sizes: Sizes, counts: UsageCounts, product: RepeatedProduct) -> "Repeated":
        result = wire.encode(wire.Result.answering(like), payload_bytes=counts.bytes_sent)
        before, _, after = result.partition(like.nonce)
        head = len(wire.encode(like, payload_bytes=sizes.received))
        return cls(like, head, sizes, (before, after), counts, product)

    def request(self, nonce: bytes) -> wire.Execute:
        """The request with this nonce."""
        return msgspec.structs.replace(self.like, nonce=nonce)


def is_plain(request: wire.Execute | wire.Effect) -> bool:
    """Returns True if requests with an equal header, but for the nonce, may follow."""
    plain = isinstance(request, wire.Execute) and not request.blocks and not request.confirms
    return plain and request.counts is None and sys.byteorder == "little"


def key_of(frame: wire.Buffer) -> bytes | None:
    """The bytes of a frame's prefix and header without the nonce; None for a header that is too long, or has not
    arrived. `frame` has the bytes that have arrived, from the prefix on."""
    size = _PREFIX + int.from_bytes(frame[4:8], "little")
    if not _END <= size <= min(len(frame), _MOST_HEADER):
        return None
    return bytes(frame[:_START]) + bytes(frame[_END:size])


def nonce_of(frame: wire.Buffer) -> bytes:
    """The nonce of a frame that has a key."""
    return bytes(frame[_START:_END])
