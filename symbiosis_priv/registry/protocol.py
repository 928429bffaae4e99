"""What is said to a registry, and what it answers: frames of `wire`, with messages of their own.

    Announce   payload: a signed descriptor           -> Accepted
    List       newest descriptors of a model          -> Listed    payload: list of signed descriptors
    History    entries of the log after a number      -> Recorded  payload: `Record`
    anything   that is not done                       -> wire.Failure

Clients show no certificate: a descriptor is signed, and everybody may read. So a registry does not learn who asks, but
from which address, and about which model.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec

from symbiosis_priv.errors import ProtocolError, one_line
from symbiosis_priv.network import wire
from symbiosis_priv.network.wire import Failure, Message
from symbiosis_priv.registry.descriptor import Digest
from symbiosis_priv.registry.history import Hash, Number
from symbiosis_priv.registry.statements import MAX_BYTES
from symbiosis_priv.system.files import UNDECODABLE

MAX_LISTED: Final = 1024
"""Executors of a registry."""
PAGE: Final = 256
"""Entries of an answer to `History`."""
MAX_REPLY: Final = MAX_LISTED * (MAX_BYTES + 8)
"""Bytes of a reply's payload."""

_Data = Annotated[bytes, msgspec.Meta(max_length=MAX_BYTES)]
_P = TypeVar("_P")


class Announce(Message, frozen=True, tag="announce"):
    """Take a descriptor into the log."""


class List(Message, frozen=True, tag="list"):
    """Say who serves layers of a model."""

    model_digest: Digest


class History(Message, frozen=True, tag="history"):
    """Show the entries after a number, or after the first that is still known."""

    after: Number


class Accepted(Message, frozen=True, tag="accepted"):
    """It is in the log, as this entry."""

    entry: Number


class Listed(Message, frozen=True, tag="listed"):
    """The newest descriptor of every executor that has not expired."""


class Recorded(Message, frozen=True, tag="recorded"):
    """A part of the log."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The payload of `Recorded`.

    Args:
        after: the number of the entry before the first one here.
        before: its hash.
        entries: in order; fewer than there are if they are many.
        head: signed by the registry whose log this is: of a replica, the newest one that it has been given.
    """

    after: Number
    before: Hash
    entries: Annotated[list[_Data], msgspec.Meta(max_length=PAGE)]
    head: _Data


Request = Announce | List | History
Reply = Accepted | Listed | Recorded | Failure

_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_listing_decoder = msgspec.msgpack.Decoder(Annotated[list[_Data], msgspec.Meta(max_length=MAX_LISTED)])
_record_decoder = msgspec.msgpack.Decoder(Record)
_encoder = msgspec.msgpack.Encoder()


def decode_request(header: wire.Buffer) -> Request:
    """Parse what a client sent."""
    return wire.decode(_request_decoder, header)


def decode_reply(header: wire.Buffer) -> Reply:
    """Parse what a registry sent."""
    return wire.decode(_reply_decoder, header)


def encode_listing(descriptors: list[bytes]) -> bytes:
    """The payload of `Listed`."""
    return _encoder.encode(descriptors)


def decode_listing(payload: wire.Buffer) -> list[bytes]:
    """Parse it. ProtocolError for what is none."""
    return _parsed(_listing_decoder, payload)


def encode_record(record: Record) -> bytes:
    """The payload of `Recorded`."""
    return _encoder.encode(record)


def decode_record(payload: wire.Buffer) -> Record:
    """Parse it. ProtocolError for what is none."""
    return _parsed(_record_decoder, payload)


def _parsed(decoder: msgspec.msgpack.Decoder[_P], payload: wire.Buffer) -> _P:
    try:
        return decoder.decode(payload)
    except UNDECODABLE as error:
        raise ProtocolError(f"bad payload: {one_line(str(error))}") from error
