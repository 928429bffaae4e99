"""The manifest: which layer groups a quantised base model has, and the digest that fixes it.

It lists every layer group with the SHA-256 of its integers, scales and bias; the manifest's own digest is what
`federation.toml` pins. Quantising is deterministic, so tenants and providers get the same digest from the same
checkpoint.
"""

from __future__ import annotations

import functools
import hashlib

import msgspec

from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.files import UNDECODABLE
from symbiosis_priv.layers import GroupSpec, layers_of
from symbiosis_priv.ring import FORWARD, Direction

MANIFEST_VERSION = 1


class GroupEntry(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One layer group of a manifest. `outputs` are the members' widths, in order."""

    members: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]
    digest: str

    @property
    def name(self) -> str:
        """Readable and unique, as in `layers.GroupSpec.name`."""
        return GroupSpec(self.members, self.inputs, self.outputs).name

    @functools.cached_property
    def stacked_outputs(self) -> int:
        """Output features of all members together."""
        return sum(self.outputs)

    def columns(self, direction: Direction) -> tuple[int, int]:
        """(columns of a request's rows, columns of its answer's)."""
        inputs, outputs = self.inputs, self.stacked_outputs
        return (inputs, outputs) if direction == FORWARD else (outputs, inputs)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a quantised base model is. Two parties with equal digests hold the same bits."""

    version: int
    weight_bits: int
    groups: tuple[GroupEntry, ...]

    @property
    def digest(self) -> str:
        """`sha256:` and the hash of the canonical JSON."""
        return "sha256:" + hashlib.sha256(self.to_json()).hexdigest()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer number of every group."""
        return layers_of(group.members[0] for group in self.groups)

    def to_json(self) -> bytes:
        """Canonical bytes: fields in declared order, no white space."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Parse; CheckpointError if it is not a manifest of this version."""
        try:
            manifest = msgspec.json.decode(data, type=cls)
        except UNDECODABLE as error:
            raise CheckpointError(f"not a manifest: {error}") from error
        if manifest.version != MANIFEST_VERSION:
            raise CheckpointError(f"manifest version {manifest.version} is not {MANIFEST_VERSION}; upgrade both sides")
        return manifest
