"""A registry's log: every descriptor that it has accepted, in order, as a hash chain with a signed head.

Theory of operation. Entry n is hashed with the hash of entry n-1, so the hash of the last one stands for all of them.
The registry signs it with its number. Two of a registry's signed heads of one number with different hashes, or a head
and entries that do not lead to it, prove that it has told different things to different people: it cannot take either
back. That does not make its descriptors any better or worse, as their own signatures say what they are worth; it shows
a registry that holds some of them back from some readers.

The chain begins with the registry's name. A log may forget its beginning: it is then known from some entry on, with the
hash that leads there (`Span.before`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from symbiosis_priv.errors import DescriptorError
from symbiosis_priv.registry import statements
from symbiosis_priv.registry.statements import Statement, Trust, Vouched

HASH_BYTES: Final = 32

_HEAD: Final = b"log head 1"
_ENTRY: Final = b"symbiosis-priv log entry 1\0"

Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""Of an entry; the first one is 1. 0 is where the log begins."""


class Head(Statement, frozen=True):
    """What a registry says its log is, at `issued`.

    Args:
        entries: how many there have been.
        hash: of the last one.
    """

    entries: Number
    hash: Hash


VouchedHead = Vouched[Head]
"""A head that has passed `verify_head`. `name` is the registry's."""


@dataclass(frozen=True)
class Span:
    """Successive entries.

    Args:
        after: the number of the entry before them; 0 at the beginning.
        before: its hash.
        entries: signed descriptors.
    """

    after: int
    before: bytes
    entries: Sequence[bytes]

    @property
    def last(self) -> int:
        """The number of the last one."""
        return self.after + len(self.entries)

    def hashes(self) -> dict[int, bytes]:
        """Of the entry before them and of every one of them, by number."""
        found = {self.after: self.before}
        for number, data in enumerate(self.entries, start=self.after + 1):
            found[number] = link(found[number - 1], data)
        return found


def beginning(name: str) -> bytes:
    """The hash that the log of a registry of this name begins with."""
    return hashlib.sha256(_ENTRY + name.encode()).digest()


def link(before: bytes, data: bytes) -> bytes:
    """The hash of an entry that follows another one's."""
    return hashlib.sha256(_ENTRY + before + hashlib.sha256(data).digest()).digest()


def sign_head(head: Head, key: PrivateKeyTypes) -> bytes:
    """A head, signed with the key of the registry's certificate."""
    return statements.sign(head, key, domain=_HEAD)


def verify_head(data: bytes, trust: Trust, *, now: float | None) -> VouchedHead:
    """A head that a registry of this federation has signed; see `statements.verify`."""
    return statements.verify(data, _decoder, domain=_HEAD, trust=trust, now=now)


def check_span(span: Span, head: VouchedHead) -> None:
    """Raises `DescriptorError` if entries are not part of the log that a head is of, as far as they can tell."""
    if not span.after and span.before != beginning(head.name):
        raise DescriptorError(f"the log of {head.name!r} does not begin as a log of that name does")
    if head.said.entries < span.last or span.hashes().get(head.said.entries) not in (None, head.said.hash):
        raise DescriptorError(f"the head of {head.name!r} is not that of the entries that it was shown with")


_decoder = msgspec.msgpack.Decoder(Head)
