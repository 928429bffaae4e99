"""The wire protocol: typed messages, followed by raw tensors.

A frame is

    prefix   12 bytes   magic "SYM1" | header length u32 | payload length u32      (little-endian)
    header   msgpack    one of the message types below, tagged by name (msgspec validates types and ranges)
    payload  bytes      one matrix in the request's encoding: int32 (ring path) or float32 (float path)

The payload's length follows from the header: `encoding.size(rows, width)`. A reader checks the prefix against its
limits, parses the header, compares the announced payload size with the size that the header implies, and only then
allocates memory for the payload. A reply repeats its request's `Binding`, so that an answer cannot be passed off as the
answer to another request (rule 7). No message contains a scale, a label or a token id (rule 5).

Segmented requests. With `counts`, rows are sorted by expert and have the width of one expert's matrix. The executor and
every helper see the counts, which depend on the tenant's rows (docs/threat-model.md).

Narrow rings. With `ring_bits = 24` the product is computed modulo 2^32, and its low 24 bits are sent.

Hybrid keys. A helper serves no version without a `KeyShare`: a recorded seed or effect must not depend on X25519 alone.
"""

import functools
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.arithmetic import keystream
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.errors import FrameTooLargeError, ProtocolError, one_line
from symbiosis_priv.limits import MAX_EXPERTS as MAX_EXPERTS
from symbiosis_priv.limits import MAX_PAYLOAD as MAX_PAYLOAD
from symbiosis_priv.limits import MAX_ROWS as MAX_ROWS
from symbiosis_priv.limits import RingBits as RingBits
from symbiosis_priv.limits import Role as Role
from symbiosis_priv.system.files import UNDECODABLE

if sys.byteorder != "little":
    raise ImportError("symbiosis-priv needs a little-endian processor: frames are in its byte order")

VERSION = 3
NARROW_VERSION = 4
"""Version 3 with narrow rings."""
HYBRID_VERSION = 6
"""Version 4 with seeds and effects under X25519 and ML-KEM-768. The only version of the role helper. Version 5 was
that of relayed effects, which no provider accepts any more."""
VERSIONS = (VERSION, NARROW_VERSION, HYBRID_VERSION)
MAGIC = b"SYM1"
PREFIX = struct.Struct("<4sII")
MAX_HEADER = 8192  # `MAX_EXPERTS` counts, of at most 5 bytes each
MAX_GROUPS = 1 << 20
NONCE_BYTES = 16
TAG_BYTES = 16
"""By how much a sealed seed is longer than the seed."""
_NARROW = 24
_BRIEF = 1 << 14  # items; docs/adr/9-lane.md


@dataclass(frozen=True)
class Encoding:
    """How a payload stores a matrix of a dtype: row-major, little-endian, 32 bits per item or the low 24 bits of int32,
    no padding. Nothing else computes payload sizes, packs or unpacks matrices."""

    dtype: torch.dtype
    item_bits: int

    @functools.cached_property
    def items(self) -> type[np.generic]:
        """The numpy type that corresponds to `dtype`."""
        if self.dtype == torch.uint8:
            return np.uint8
        return np.int32 if self.dtype == torch.int32 else np.float32

    def size(self, rows: int, width: int) -> int:
        """Bytes of a matrix `[rows, width]` in a payload."""
        return -(-rows * width * self.item_bits // 8)

    def pack(self, matrix: Tensor | NDArray[Any]) -> memoryview:
        """The payload of a CPU matrix of `dtype`. With 32 bits it is not a copy if the matrix is contiguous. `pack` and
        `unpack` avoid torch where possible (docs/adr/9-lane.md)."""
        if isinstance(matrix, Tensor):
            matrix = (matrix.detach() if matrix.requires_grad else matrix).numpy()
        array = np.ascontiguousarray(matrix)
        if not array.size:  # a memoryview with a zero in its shape cannot be cast
            return memoryview(b"")
        if self.item_bits == _NARROW:
            packed = np.empty(3 * array.size, dtype=np.uint8)
            if not _compiled("ring_pack24", array, array.size, packed):
                words = array.astype("<i4", copy=False).reshape(-1).view(np.uint8)
                packed.reshape(-1, 3)[:] = words.reshape(-1, 4)[:, :3]
            return packed.data
        return array.data.cast("B")

    def unpack(self, payload: bytearray | memoryview | np.ndarray, *, rows: int) -> Tensor:
        """The matrix `[rows, width]` of a writable payload. With 32 bits it is not a copy. With 24 bits, items are the
        signed representatives, -2^23 to 2^23 - 1."""
        if self.item_bits == _NARROW:
            packed = np.frombuffer(payload, dtype=np.uint8)
            array = np.empty(len(packed) // 3, dtype=np.int32)
            _unpack24(packed, array)
        else:
            array = np.frombuffer(payload, dtype=self.items)
        return torch.from_numpy(array.reshape(rows, -1 if rows else 0))

    def payload_space(self, matrix: NDArray[Any]) -> memoryview:
        """The part of a contiguous matrix's memory that its payload fills before `unpack_in_place` is called."""
        return matrix.data.cast("B")[-self.size(1, matrix.size) :] if matrix.size else memoryview(bytearray())

    def unpack_in_place(self, matrix: NDArray[Any]) -> None:
        """Turn the payload that fills `payload_space(matrix)` into the matrix, in place."""
        if self.item_bits == _NARROW:
            _unpack24(np.frombuffer(self.payload_space(matrix), dtype=np.uint8), matrix)


RING32 = Encoding(torch.int32, 32)
"""Integers modulo 2^32."""
RING24 = Encoding(torch.int32, _NARROW)
"""Integers modulo 2^24."""
BYTES24 = Encoding(torch.uint8, 8)
"""The payloads of `RING24` as they are: a matrix of bytes, three for each integer."""
FLOAT32 = Encoding(torch.float32, 32)


def _compiled(function: str, source: NDArray[Any], items: int, target: NDArray[Any]) -> bool:
    """Call a function of the compiled library. Returns False if there is no library."""
    if (library := native.library()) is None:
        return False
    if items:
        library = native.brief_library() if items <= _BRIEF else library
        getattr(library, function)(native.best(library), source.ctypes.data, items, target.ctypes.data)
    return True


def _unpack24(packed: NDArray[np.uint8], items: NDArray[np.int32]) -> None:
    """Write the signed representatives. `packed` may be the end of the memory of `items`."""
    if not _compiled("ring_unpack24", packed, items.size, items):
        words = np.zeros((items.size, 4), dtype=np.uint8)
        words[:, 1:] = packed.reshape(-1, 3)
        items.reshape(-1)[:] = words.reshape(-1).view("<i4") >> 8


Arithmetic = Literal["ring", "float", "float_bias_free"]
"""The arithmetic of a product: exact ring; float with bias (forward); float without (`float_bias_free`, backward)."""


def encoding_of(arithmetic: Arithmetic, ring_bits: RingBits = 32) -> Encoding:
    if arithmetic != "ring":
        return FLOAT32
    return RING32 if ring_bits == RING32.item_bits else RING24


def version_of(ring_bits: RingBits, *, role: Role = "executor") -> int:
    """The version in a tenant's `Hello`: the lowest one with everything that the tenant uses."""
    if role == "helper":
        return HYBRID_VERSION
    return VERSION if ring_bits == RING32.item_bits else NARROW_VERSION


Text = Annotated[str, msgspec.Meta(max_length=512)]
Rows = Annotated[int, msgspec.Meta(ge=0, le=MAX_ROWS)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""A finite number: neither infinite nor nan."""
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Seed = Annotated[
    keystream.Seed, msgspec.Meta(min_length=keystream.SEED_BYTES, max_length=keystream.SEED_BYTES + TAG_BYTES)
]
"""A seed; on a connection it is sealed (`hybrid.Sealing`)."""


class ErrorCode(StrEnum):
    """Reasons of a `Failure`. After a code in `RETRYABLE`, the tenant may send the same bytes again."""

    BAD_FRAME = "bad_frame"
    BAD_REQUEST = "bad_request"
    TOO_LARGE = "too_large"
    WRONG_MODEL = "wrong_model"
    ROLE_REFUSED = "role_refused"
    NOT_SERVED = "not_served"
    REVOKED = "revoked"
    REFUSED = "refused"
    BUSY = "busy"
    STOPPING = "stopping"
    INTERNAL = "internal"
    UNREACHABLE = "unreachable"  # a registry's: it cannot connect to the executor


RETRYABLE = frozenset({ErrorCode.BUSY, ErrorCode.STOPPING})


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of every header."""


class Hello(Message, frozen=True, tag="hello"):
    """First message of a connection: the tenant's wire version, the role it asks for, and the pinned model."""

    version: int
    role: Role
    model_digest: Text


class Welcome(Message, frozen=True, tag="welcome"):
    """The provider's answer to `Hello`: its model, the layer groups that it serves (`range(first_group, end_group)`, at
    least one), and its limits: rows of a request, and bytes of a request's or a reply's matrix."""

    version: int
    model_digest: Text
    first_group: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)]
    end_group: Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUPS)]
    max_rows: Rows
    max_payload: Annotated[int, msgspec.Meta(ge=4, le=MAX_PAYLOAD)]

    def __post_init__(self) -> None:
        if self.first_group >= self.end_group:
            raise ValueError("end_group is not beyond first_group")

    @property
    def groups(self) -> range:
        return range(self.first_group, self.end_group)


class KeyShare(Message, frozen=True, tag="key_share"):
    """A tenant's public keys for one connection with a helper: ML-KEM-768 and then X25519."""

    share: Annotated[bytes, msgspec.Meta(min_length=1216, max_length=1216)]


class KeyAnswer(Message, frozen=True, tag="key_answer"):
    """The helper's answer: an ML-KEM-768 ciphertext and then an X25519 public key."""

    share: Annotated[bytes, msgspec.Meta(min_length=1120, max_length=1120)]


class Binding(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The fields that tie a reply to its request (rule 7). `counts` are the rows of every expert of a stack; None with
    the whole matrix of the group. `ring_bits` are the bits of an integer of the payloads, with ring arithmetic."""

    nonce: Nonce
    group: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)]
    direction: Direction
    arithmetic: Arithmetic
    rows: Rows
    counts: Annotated[tuple[Rows, ...], msgspec.Meta(max_length=MAX_EXPERTS)] | None = None
    ring_bits: RingBits = 32

    @property
    def encoding(self) -> Encoding:
        """The encoding of the request's matrix, and of the reply's."""
        return encoding_of(self.arithmetic, self.ring_bits)

    def binding(self) -> dict[str, Any]:
        """The fields of the binding, for another message. (`Result.answering` names them, which is faster.)"""
        return {name: getattr(self, name) for name in Binding.__struct_fields__}


class Execute(Binding, frozen=True, tag="execute"):
    """Multiply the payload's rows by a layer group. Payload: `[rows, inputs]` (`[rows, outputs]` backward). With
    `counts`, the widths are those of one expert's matrix."""


class Effect(Binding, frozen=True, kw_only=True, tag="effect"):
    """Expand keystream rows under a seed and return their product. No payload; ring path only."""

    seed: Seed
    first_row: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]

    def __post_init__(self) -> None:
        if keystream.SEED_BYTES < len(self.seed) < keystream.SEED_BYTES + TAG_BYTES:
            raise ValueError("seed is neither bare nor sealed")

    def __repr__(self) -> str:
        """Leaves out the seed, so that a log line with a request does not reveal a pad."""
        return f"Effect(group={self.group}, direction={self.direction!r}, first_row={self.first_row}, rows={self.rows})"


class QuotaLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tenant's quota that a request has reached. The tenant shows it to its user, and does nothing else with it."""

    amount: Annotated[float, msgspec.Meta(gt=0, le=1e15)]
    unit: Literal["requests/s", "rows/s", "billion multiply-adds/s", "rows in flight"]

    def __str__(self) -> str:
        """The limit as text, for example `300 rows/s`."""
        return f"{self.amount:,.10g} {self.unit}"


class Result(Binding, frozen=True, tag="result", omit_defaults=True):
    """The product. Payload: `[rows, outputs]` (`[rows, inputs]` backward). `limit` is the quota for which the request
    had to wait before it was admitted."""

    limit: QuotaLimit | None = None

    @classmethod
    def answering(cls, request: Binding, *, limit: QuotaLimit | None = None) -> Self:
        return cls(
            limit=limit,
            nonce=request.nonce,
            group=request.group,
            direction=request.direction,
            arithmetic=request.arithmetic,
            rows=request.rows,
            counts=request.counts,
            ring_bits=request.ring_bits,
        )

    def answers(self, request: Binding) -> bool:
        """Returns True if every field of the binding equals the request's (rule 7)."""
        return self == Result.answering(request, limit=self.limit)


class FetchHealth(Message, frozen=True, tag="health"):
    """Ask for a `HealthReport`."""


class HealthReport(Message, frozen=True, tag="health_report"):
    """State of a provider, by its own clock (`time`, seconds since 1970, UTC), with the numbers of layer groups that it
    serves and has in memory. `requests` and `connections` count only those of the tenant that asks."""

    name: Text
    model_digest: Text
    time: Seconds
    uptime_s: Seconds
    groups: Count
    groups_loaded: Count
    requests: Count
    connections: Count


class Failure(Message, frozen=True, tag="failure", omit_defaults=True):
    """The request was not carried out, because of the tenant's quota if there is a `limit`. The connection stays open
    unless the frame itself was broken."""

    code: ErrorCode
    detail: Text
    limit: QuotaLimit | None = None


Buffer = bytes | bytearray | memoryview
Request = Hello | KeyShare | Execute | Effect | FetchHealth
Reply = Welcome | KeyAnswer | Result | HealthReport | Failure

_M = TypeVar("_M")

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message, *, payload_bytes: int = 0) -> bytes:
    """Prefix and header of a frame, which its payload follows. Raises `FrameTooLargeError`: one is over its limit."""
    header = _encoder.encode(message)
    if len(header) > MAX_HEADER or payload_bytes > MAX_PAYLOAD:
        raise FrameTooLargeError(f"header of {len(header)} or payload of {payload_bytes} bytes is over the limit")
    return PREFIX.pack(MAGIC, len(header), payload_bytes) + header


def decode_prefix(prefix: Buffer, *, max_payload: int) -> tuple[int, int]:
    """Return (header length, payload length) of a frame. Checks both against the limits before anything is allocated.
    Raises `ProtocolError`: not a frame of this protocol; `FrameTooLargeError`: a length exceeds its limit."""
    if len(prefix) != PREFIX.size:
        raise ProtocolError(f"a frame's prefix has {PREFIX.size} bytes, got {len(prefix)}")
    magic, header, payload = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ProtocolError("not a symbiosis-priv frame (wrong magic); is this the right port?")
    if not 0 < header <= MAX_HEADER:
        raise FrameTooLargeError(f"header of {header} bytes; at most {MAX_HEADER}")
    if payload > max_payload:
        raise FrameTooLargeError(f"payload of {payload} bytes; at most {max_payload}")
    return header, payload


def decode(decoder: msgspec.msgpack.Decoder[_M], header: Buffer) -> _M:
    """Parse the header of a frame with messages of one protocol. Raises `ProtocolError`: not a valid header."""
    try:
        return decoder.decode(header)
    except UNDECODABLE as error:
        # the cause is left out, because it may quote received bytes
        raise ProtocolError(f"bad header: {one_line(str(error))}") from error


decode_request: Callable[[Buffer], Request] = functools.partial(decode, msgspec.msgpack.Decoder(Request))
"""Parse a tenant's message."""
decode_reply: Callable[[Buffer], Reply] = functools.partial(decode, msgspec.msgpack.Decoder(Reply))
"""Parse a provider's message."""
