"""The messages between a registry and its clients, in frames of `wire`.

    Announce   payload: a signed descriptor   -> Accepted
    List                                      -> Listed    payload: list of signed descriptors
    any request that fails                    -> wire.Failure

Clients show no certificate: descriptors are signed, and every client may read them. So a registry learns a client's
address and the model that the client asks for, but not the client's name.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Final

import msgspec

from symbiosis_priv.errors import ProtocolError, one_line
from symbiosis_priv.network import wire
from symbiosis_priv.network.wire import Failure, Message
from symbiosis_priv.registry.descriptor import MAX_BYTES, Digest
from symbiosis_priv.system.files import UNDECODABLE

MAX_LISTED: Final = 1024
"""Largest number of executors in a registry."""
MAX_REPLY: Final = MAX_LISTED * (MAX_BYTES + 8)
"""Size limit of a reply's payload, in bytes."""


class Announce(Message, frozen=True, tag="announce"):
    """Store a descriptor."""


class List(Message, frozen=True, tag="list"):
    """List the executors of a model, or of all models if it is None."""

    model_digest: Digest | None = None


class Accepted(Message, frozen=True, tag="accepted"):
    """The registry has stored the descriptor."""


class Listed(Message, frozen=True, tag="listed"):
    """The newest descriptor of every executor that has not expired."""


Request = Announce | List
Reply = Accepted | Listed | Failure

decode_request: Callable[[wire.Buffer], Request] = partial(wire.decode, msgspec.msgpack.Decoder(Request))
"""Parse a client's request. Raises `ProtocolError`."""
decode_reply: Callable[[wire.Buffer], Reply] = partial(wire.decode, msgspec.msgpack.Decoder(Reply))
"""Parse a registry's reply. Raises `ProtocolError`."""

_Data = Annotated[bytes, msgspec.Meta(max_length=MAX_BYTES)]
_listing_decoder: msgspec.msgpack.Decoder[list[bytes]] = msgspec.msgpack.Decoder(
    Annotated[list[_Data], msgspec.Meta(max_length=MAX_LISTED)]
)


def decode_listing(payload: wire.Buffer) -> list[bytes]:
    """Parse the payload of `Listed`. Raises `ProtocolError`."""
    try:
        return _listing_decoder.decode(payload)
    except UNDECODABLE as error:
        raise ProtocolError(f"bad payload: {one_line(str(error))}") from error
