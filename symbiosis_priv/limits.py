"""Names and limits that command lines, files and arithmetic share. Does not import torch, for a fast `--help`."""

from typing import Annotated, Final, Literal, NewType

from msgspec import Meta

Role = Literal["executor", "helper"]  # the role of a provider towards a tenant

MAX_PAYLOAD: Final = (1 << 32) - 1  # largest payload in bytes: the prefix of a frame states its size in 32 bits
MAX_ROWS: Final = 1 << 24  # largest number of rows of a request
MAX_EXPERTS: Final = 1024  # largest number of experts of a stack

MIN_WEIGHT_BITS: Final = 4
MAX_WEIGHT_BITS: Final = 12
DEFAULT_WEIGHT_BITS: Final = 10
WeightBits = Annotated[int, Meta(ge=MIN_WEIGHT_BITS, le=MAX_WEIGHT_BITS)]  # bits of a quantised weight

GroupIndex = NewType("GroupIndex", int)  # the number of a layer group in its manifest, from 0
MAX_SECONDS: Final = 86_400.0  # longest time limit or interval of a command, or of a provider's configuration

RingBits = Literal[24, 32]  # bits of an integer of a masked row, an effect or an answer on the wire
DEFAULT_RING_BITS: Final = 32
HintBits = Literal[16, 20, 24, 32]  # bits of an entry of a hint of `masking = "lwe"`
DEFAULT_HINT_BITS: Final = 16
