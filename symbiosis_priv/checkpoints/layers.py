"""Layers are transformer blocks. Layer groups are the linears that the wire protocol numbers.

A group's index is its place in the manifest. Operators count blocks instead ("layers 0 to 15"). The name of a block is
a module's path up to its first number: `model.layers.3` for `model.layers.3.mlp.up_proj`. Blocks are numbered in the
order in which the manifest first names them, encoder before decoder. A group outside all blocks, such as an LM head,
belongs to the block before it, or to the first block. So layer numbers never decrease along the manifest, and a range
of layers is one contiguous range of groups.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import msgspec

from symbiosis_priv.errors import ConfigError

Joined = Literal["outputs", "inputs"]
"""The dimension along which the matrices of an expert stack are joined to one dense matrix."""

RoundTrips = Literal[2, 4]  # round trips of a transformer block while tokens are decoded

AGAIN, THROUGH = "@again", "@through"
"""Endings of a composed group's members: its first linear, and the linears that follow it, through norm and first
linear."""

_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True)
class Scope:
    """The optional layer groups that providers serve. All parties of a federation agree on them: they change the
    digest."""

    tied_head: bool = False  # the product of an LM head whose weight is the embedding table, which the tenant keeps
    experts: bool = True  # the stacks of experts
    round_trips: RoundTrips = 4  # 2 adds composed groups, with which a block takes two round trips during decoding


DEFAULT_SCOPE = Scope()


class Composed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What lies between the first linear of a composed group and the others (`discovery.residuals`)."""

    residual: str  # the norm whose input is added to the first linear's output
    norm: str  # the norm of that sum
    parameters: tuple[str, ...] = ("weight",)  # of the norm: `weight`, `weight` and `bias`, or none
    one_plus: bool = False  # the norm multiplies by one plus its weight
    centred: bool = False  # the norm subtracts the mean of a row first, as LayerNorm does


@dataclass(frozen=True)
class GroupSpec:
    """A group of linears that share one input, or a stack: the matrices of all experts of a layer for one product. A
    stack is one dense matrix. If it is joined along `outputs` (gate and up), and each expert has n outputs, expert k
    has the outputs `k n` to `(k + 1) n - 1`. If it is joined along `inputs` (down), the same holds for inputs. A
    `composed` group has the matrix W1 of one linear, and below it `W2 diag(g) C W1` for each linear W2 that follows the
    norm with the weight g. C subtracts the mean, if the norm does."""

    members: tuple[str, ...]  # module names in call order
    inputs: int
    outputs: tuple[int, ...]
    experts: int = 1  # number of matrices in a stack; 1 for linears
    joined: Joined = "outputs"
    composed: Composed | None = None

    @property
    def name(self) -> str:
        """A readable, unique name: the first member's name, and the number of further members."""
        return self.members[0] if len(self.members) == 1 else f"{self.members[0]}+{len(self.members) - 1}"

    def shape(self, outputs: int, *, transposed: bool) -> tuple[int, ...]:
        """The shape of a member's weight in the model: `[out, in]`, or `[experts, out, in]` for a stack. If the model
        holds it `transposed`, the last two are exchanged."""
        inputs = self.inputs
        if self.joined == "outputs":
            outputs //= self.experts
        else:
            inputs //= self.experts
        matrix = (inputs, outputs) if transposed else (outputs, inputs)
        return matrix if self.experts == 1 else (self.experts, *matrix)


def is_offloaded(parameter: str, members: Collection[str]) -> bool:
    """Returns True if a parameter of a model is the weight or bias of a member, or a stack of experts."""
    return parameter in members or parameter.rpartition(".")[0] in members


def layers_of(names: Iterable[str]) -> tuple[int, ...]:
    """The layer number of every group, from the groups' names or their first members' names in the manifest's order."""
    seen: set[str] = set()
    layers = []
    for name in names:
        parts = name.split(".")
        numbered = next((i for i, part in enumerate(parts) if part.partition("+")[0].isdecimal()), None)
        if numbered is not None:
            seen.add(".".join([*parts[:numbered], parts[numbered].partition("+")[0]]))
        layers.append(max(0, len(seen) - 1))
    return tuple(layers)


@dataclass(frozen=True, order=True)
class LayerRange:
    """Layers `first` to `last`, both included. Raises `ConfigError`: the range is empty, or begins before layer 0."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise ConfigError(
                f"layers {self.first}-{self.last} is not a range: write the first and the last one, as in 0-15"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `"0-15"`, or `"7"` for one layer. Raises `ConfigError`: the text has another form."""
        found = _RANGE.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"layers = {text!r} is not a range of layers: write the first and the last one, as in '0-15'"
            )
        return cls(int(found[1]), int(found[2] or found[1]))

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer <= self.last

    def groups(self, layers: Sequence[int]) -> range:
        """The layer groups of this range, given the layer number of every group of the whole model (`layers_of`).
        Raises `ConfigError` if the model has no such layers."""
        if not layers or self.last > layers[-1]:
            there = str(LayerRange(0, layers[-1])) if layers else "none"
            raise ConfigError(f"layers = '{self}' goes beyond this model, whose layers are {there}")
        inside = [group for group, layer in enumerate(layers) if layer in self]
        return range(inside[0], inside[-1] + 1)


def spans(numbers: Iterable[int]) -> tuple[LayerRange, ...]:
    """The fewest ranges that contain exactly these numbers, in ascending order."""
    ordered = sorted(set(numbers))
    runs = itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
    parts = [[number for _, number in run] for _, run in runs]
    return tuple(LayerRange(part[0], part[-1]) for part in parts)


def whole_layers(groups: range, layers: Sequence[int]) -> tuple[int, ...]:
    """The layers whose groups all lie inside a range of groups."""
    missing = {layer for group, layer in enumerate(layers) if group not in groups}
    return tuple(sorted(set(layers) - missing))
