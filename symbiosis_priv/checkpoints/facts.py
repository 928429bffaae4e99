"""Public facts of a layer group, which a tenant keeps instead of the weights.

The facts come from one pass over the checkpoint, layer by layer, and are cached under the manifest's digest. They are
not secret. A wrong fact can make a product wrong, but cannot reveal a row.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.quantise import QuantisedGroup
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Bound, Direction, Widths
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.errors import RangeError
from symbiosis_priv.limits import RingBits


@dataclass(frozen=True)
class GroupFacts:
    """Public facts of one layer group.

    Args:
        entry: names and widths, from the manifest.
        channel_scale: float64 `[o]`, the weight scales.
        bias: float64 `[o]` or None; the tenant adds it.
        bounds: limits of input rows, per direction.
        by_expert: the facts for rows that each belong to one expert of a stack, with `channel_scale` and `bias`
            `[experts, o]`; None if the group is not a stack.
    """

    entry: GroupEntry
    channel_scale: Tensor
    bias: Tensor | None
    bounds: dict[Direction, Bound]
    by_expert: "GroupFacts | None" = None

    @classmethod
    def of(cls, entry: GroupEntry, group: QuantisedGroup) -> Self:
        bias = None if group.bias is None else group.bias.to(torch.float64)
        facts = cls(entry, group.channel_scale, bias, group.bounds())
        if entry.experts == 1:
            return facts
        return facts.as_stack(group.bounds(experts=entry.experts, along_outputs=not entry.transposed))

    def as_stack(self, bounds: dict[Direction, Bound]) -> Self:
        """A copy of these facts of a stack, with `by_expert` set.

        Args:
            bounds: limits of rows for one expert.
        """
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

    def narrowed(self, ring_bits: RingBits, *, headroom_bits: int = 0) -> Self:
        """A copy for products of which `ring_bits` bits are sent, with rows scaled down by `headroom_bits` more
        bits."""
        bounds = {way: bound.narrowed(ring_bits).with_headroom(headroom_bits) for way, bound in self.bounds.items()}
        by_expert = self.by_expert and self.by_expert.narrowed(ring_bits, headroom_bits=headroom_bits)
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
