"""The manifest: which layer groups a quantised base model has, and the digest that fixes it.

A manifest lists every layer group with the SHA-256 of its integers, scales and bias; `federation.toml` pins the digest
of the manifest. Quantising is deterministic, so tenants and providers get the same digest from the same checkpoint.

A tenant keeps public facts of a layer group instead of the weights (`GroupFacts`), cached under the manifest's digest.
They are not secret. A wrong fact can make a product wrong, but cannot reveal a row.

A model holds a stack of experts as `[experts, out, in]`, or transposed as `[experts, in, out]`. A layer group holds it
as one matrix `[o, d]` (`Stack`), so that products, masks, checks and quantisation are those of a linear. Gate and up
are joined along the outputs: every row is multiplied by every expert. Down is joined along the inputs: its product is
the sum over experts, and a row has zeros where an expert does not take part.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Self

import msgspec
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.quantise import QuantisedGroup
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, NO_HEADROOM, Bound, Direction, Headroom, Widths
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.layers import AGAIN, Composed, GroupSpec, Joined, layers_of
from symbiosis_priv.errors import CheckpointError, RangeError
from symbiosis_priv.limits import MAX_EXPERTS, RingBits, WeightBits
from symbiosis_priv.system.files import UNDECODABLE

MANIFEST_VERSION = 1

_Width = Annotated[int, msgspec.Meta(ge=1, lt=1 << 30)]  # a longer row would not fit a frame


class GroupEntry(msgspec.Struct, frozen=True, kw_only=True, dict=True, omit_defaults=True):
    """One layer group of a manifest: a `layers.GroupSpec` with the SHA-256 of its integers, scales and bias, in hex."""

    members: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    inputs: _Width
    outputs: Annotated[tuple[_Width, ...], msgspec.Meta(min_length=1)]
    digest: str
    experts: Annotated[int, msgspec.Meta(ge=1, le=MAX_EXPERTS)] = 1
    joined: Joined = "outputs"
    composed: Composed | None = None

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
        """The entry of one expert's matrix in this stack, for requests with counts. The entry has its own name, and so
        its own keystreams and row counters: dense rows and rows of one expert have different widths, and must never
        share a mask."""
        inputs, outputs = self.inputs, self.stacked_outputs
        if self.joined == "outputs":
            outputs //= self.experts
        else:
            inputs //= self.experts
        return GroupEntry(members=(f"{self.name} by expert",), inputs=inputs, outputs=(outputs,), digest=self.digest)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a quantised base model. Two parties with equal digests hold the same bits."""

    version: int
    weight_bits: WeightBits
    groups: tuple[GroupEntry, ...]

    @property
    def digest(self) -> str:
        """`sha256:` and the hash of the canonical JSON."""
        return "sha256:" + hashlib.sha256(self.to_json()).hexdigest()

    @property
    def layers(self) -> tuple[int, ...]:
        return layers_of(group.members[0] for group in self.groups)

    def entry(self, index: int, *, by_expert: bool) -> GroupEntry:
        """The entry of a layer group, or of one expert's matrix in it."""
        entry = self.groups[index]
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


def while_decoding(groups: Sequence[GroupEntry]) -> list[GroupEntry]:
    """The layer groups whose products a token takes: a composed group takes the place of its first linear's group."""
    replaced = {entry.members[0].removesuffix(AGAIN) for entry in groups if entry.composed is not None}
    return [entry for entry in groups if entry.members[0] not in replaced]


def price_of_composing(groups: Sequence[GroupEntry]) -> tuple[float, float]:
    """The factors by which composed groups multiply the weights that a provider holds, and the multiply-adds of a
    token."""
    ordinary, every, token = (
        sum(entry.inputs * entry.stacked_outputs for entry in entries)
        for entries in ([entry for entry in groups if entry.composed is None], groups, while_decoding(groups))
    )
    return every / ordinary, token / ordinary


def separate(matrix: Tensor, *, experts: int, joined: Joined, transposed: bool) -> Tensor:
    """The stack `[experts, out, in]` (`[experts, in, out]` if `transposed`) of a dense matrix `[o, d]`
    (`quantise.Stack`). Shares its memory."""
    matrices: Tensor
    if joined == "outputs":
        matrices = matrix.unflatten(0, (experts, -1))
    else:
        matrices = matrix.unflatten(1, (experts, -1)).transpose(0, 1)
    return matrices.transpose(1, 2) if transposed else matrices


@dataclass(frozen=True)
class GroupFacts:
    """Public facts of one layer group. Of a stack, `by_expert` are the facts for rows that each belong to one expert,
    with scales and bias `[experts, o]`."""

    entry: GroupEntry
    channel_scale: Tensor  # float64 `[o]`, the weight scales
    bias: Tensor | None  # float64 `[o]`; the tenant adds it
    bounds: dict[Direction, Bound]  # limits of input rows
    by_expert: "GroupFacts | None" = None

    @classmethod
    def of(cls, entry: GroupEntry, group: QuantisedGroup) -> Self:
        bias = None if group.bias is None else group.bias.to(torch.float64)
        facts = cls(entry, group.channel_scale, bias, group.bounds())
        if entry.experts == 1:
            return facts
        return facts.as_stack(group.bounds(experts=entry.experts, along_outputs=not entry.transposed))

    def as_stack(self, bounds: dict[Direction, Bound]) -> Self:
        """A copy of these facts of a stack, with `by_expert` set. `bounds`: limits of rows for one expert."""
        experts, outputs = self.entry.experts, self.entry.by_expert.stacked_outputs
        scale, bias = self.channel_scale, self.bias
        if self.entry.transposed:  # each expert has as many outputs as the whole matrix
            scale, bias = scale.expand(experts, outputs), None
        else:
            scale, bias = scale.view(experts, outputs), None if bias is None else bias.view(experts, outputs)
        return replace(self, by_expert=GroupFacts(self.entry.by_expert, scale, bias, bounds))

    def for_rows(self, counts: Counts | None) -> "GroupFacts":
        """The facts for rows with these counts: of the whole matrix, or of one expert's. Raises `RangeError`: there are
        counts, and the group is not a stack of experts."""
        if counts is None:
            return self
        if self.by_expert is None:
            raise RangeError(f"{self.entry.name} is not a stack of experts; leave out the counts")
        return self.by_expert

    def narrowed(self, ring_bits: RingBits, headroom: Headroom = NO_HEADROOM) -> Self:
        """A copy for products of which `ring_bits` bits are sent, and to which a masking scheme adds something."""
        bounds = {way: bound.narrowed(ring_bits, headroom) for way, bound in self.bounds.items()}
        by_expert = self.by_expert and self.by_expert.narrowed(ring_bits, headroom)
        return replace(self, bounds=bounds, by_expert=by_expert)

    @cached_property
    def columns(self) -> dict[Direction, Widths]:
        """Width of an input row and of an answer row, per direction."""
        return {direction: self.entry.columns(direction) for direction in DIRECTIONS}

    @cached_property
    def widest(self) -> int:
        return max(self.columns[FORWARD])

    def inputs(self, direction: Direction) -> int:
        return self.columns[direction].rows

    def outputs(self, direction: Direction) -> int:
        return self.columns[direction].result
