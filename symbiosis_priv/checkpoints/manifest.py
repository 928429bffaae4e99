"""The manifest: which layer groups a quantised base model has, and the digest that fixes it.

A manifest lists every layer group with the SHA-256 of its integers, scales and bias; `federation.toml` pins the digest
of the manifest. Quantising is deterministic, so tenants and providers get the same digest from the same checkpoint.
"""

import functools
import hashlib
from typing import Annotated, Self

import msgspec

from symbiosis_priv.arithmetic.ring import Direction, Widths
from symbiosis_priv.checkpoints.layers import GroupSpec, Joined, layers_of
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.limits import MAX_EXPERTS, MAX_WEIGHT_BITS, MIN_WEIGHT_BITS
from symbiosis_priv.system.files import UNDECODABLE

MANIFEST_VERSION = 1

_Width = Annotated[int, msgspec.Meta(ge=1, lt=1 << 30)]  # a longer row would not fit a frame


class GroupEntry(msgspec.Struct, frozen=True, kw_only=True, dict=True, omit_defaults=True):
    """One layer group of a manifest.

    Args:
        members: names of the linears, which share one input.
        outputs: the members' output features, in order.
        digest: SHA-256 of integers, scales and bias, in hex.
        experts, joined: as in `layers.GroupSpec`. A stack has one member.
    """

    members: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    inputs: _Width
    outputs: Annotated[tuple[_Width, ...], msgspec.Meta(min_length=1)]
    digest: str
    experts: Annotated[int, msgspec.Meta(ge=1, le=MAX_EXPERTS)] = 1
    joined: Joined = "outputs"

    def __post_init__(self) -> None:
        if (self.stacked_outputs if self.joined == "outputs" else self.inputs) % self.experts:
            raise ValueError(f"{self.experts} experts do not share {self.joined} evenly")

    @property
    def name(self) -> str:
        """Readable and unique, as in `layers.GroupSpec.name`."""
        return GroupSpec(self.members, self.inputs, self.outputs).name

    @functools.cached_property
    def stacked_outputs(self) -> int:
        """Output features of all members together."""
        return sum(self.outputs)

    def columns(self, direction: Direction) -> Widths:
        """The columns of a request's rows and of its answer's rows."""
        return Widths.of(self.inputs, self.stacked_outputs, direction)

    @functools.cached_property
    def transposed(self) -> bool:
        """True if the weights are packed transposed: experts are always joined along the packed outputs."""
        return self.experts > 1 and self.joined == "inputs"

    @functools.cached_property
    def by_expert(self) -> "GroupEntry":
        """The entry of one expert's matrix in this stack, for requests with counts.

        The entry has its own name, and so its own keystreams and row counters: dense rows and rows of one expert have
        different widths, and must never share a mask.
        """
        inputs, outputs = self.inputs, self.stacked_outputs
        if self.joined == "outputs":
            outputs //= self.experts
        else:
            inputs //= self.experts
        return GroupEntry(members=(f"{self.name} by expert",), inputs=inputs, outputs=(outputs,), digest=self.digest)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a quantised base model. Two parties with equal digests hold the same bits."""

    version: int
    weight_bits: Annotated[int, msgspec.Meta(ge=MIN_WEIGHT_BITS, le=MAX_WEIGHT_BITS)]
    groups: tuple[GroupEntry, ...]

    @property
    def digest(self) -> str:
        """`sha256:` and the hash of the canonical JSON."""
        return "sha256:" + hashlib.sha256(self.to_json()).hexdigest()

    @property
    def layers(self) -> tuple[int, ...]:
        return layers_of(group.members[0] for group in self.groups)

    def entry(self, group: int, *, by_expert: bool) -> GroupEntry:
        """The entry of a layer group, or of one expert's matrix in it."""
        entry = self.groups[group]
        return entry.by_expert if by_expert else entry

    def to_json(self) -> bytes:
        """Canonical bytes: fields in declared order, no white space."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse a manifest. Raises `CheckpointError`: not a manifest, or one of another version."""
        try:
            manifest = msgspec.json.decode(data, type=cls)
        except UNDECODABLE as error:
            raise CheckpointError(f"not a manifest: {error}") from error
        if manifest.version != MANIFEST_VERSION:
            raise CheckpointError(f"manifest version {manifest.version} is not {MANIFEST_VERSION}; upgrade both sides")
        return manifest
