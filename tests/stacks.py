"""Treats linears of an ordinary checkpoint as stacks of experts, so that tests of products need no mixture of experts.

A stack is a dense matrix with a number of experts, so any matrix whose width divides can be one: here some linears of
Llama and GPT-2 are joined along their outputs, as gate and up are, and some along their inputs, as down is.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts, segments
from symbiosis_priv.checkpoints.discovery.skeleton import Skeleton
from symbiosis_priv.checkpoints.layers import GroupSpec, Joined
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.checkpoints.weights import WeightStore

EXPERTS = 4
STACKED: dict[str, tuple[int, Joined]] = {
    "o_proj": (EXPERTS, "outputs"),
    "down_proj": (EXPERTS, "inputs"),
    "c_fc": (3, "outputs"),
    "c_proj": (3, "inputs"),
}


def declare_stacks(patch: pytest.MonkeyPatch) -> None:
    """From now on, every `WeightStore` of this process finds stacks. Give each one a cache without dense manifests."""
    found = vars(WeightStore)["skeleton"].fget

    def stacked(spec: GroupSpec) -> GroupSpec:
        experts, joined = STACKED.get(spec.members[0].rpartition(".")[2], (1, "outputs"))
        return replace(spec, experts=experts, joined=joined)

    def skeleton(store: WeightStore) -> Skeleton:
        one: Skeleton = found(store)
        return replace(one, groups=tuple(map(stacked, one.groups)))

    patch.setattr(WeightStore, "skeleton", property(skeleton))


def stacks_of(store: WeightStore) -> dict[int, GroupEntry]:
    """The stacks of a model, by group index."""
    return {index: entry for index, entry in enumerate(store.manifest().groups) if entry.experts > 1}


def expert_counts(experts: int = EXPERTS, *, most: int = 9) -> SearchStrategy[Counts]:
    """Rows of every expert: none at all, all at one expert, or any numbers."""
    one = st.integers(0, experts - 1).map(lambda chosen: tuple(most * (k == chosen) for k in range(experts)))
    return st.just((0,) * experts) | one | st.tuples(*[st.integers(0, most)] * experts)


def expert_product(weight: Tensor, counts: Counts, rows: Tensor, direction: Direction, joined: Joined) -> Tensor:
    """The reference: int64 products wrap modulo 2^64, so their low 32 bits are the ring's.

    Args:
        weight: `[o, d]`, the dense matrix of the stack.
        rows: int32 `[r, ...]`, sorted by expert.
    """
    matrices = weight.to(torch.int64).chunk(len(counts), dim=0 if joined == "outputs" else 1)
    width = matrices[0].shape[0 if direction == FORWARD else 1]
    parts = [torch.empty((0, width), dtype=torch.int64)]
    for expert, span in segments(counts):
        matrix = matrices[expert]
        parts.append(rows[span].to(torch.int64) @ (matrix.t() if direction == FORWARD else matrix))
    return torch.cat(parts).to(torch.int32)
