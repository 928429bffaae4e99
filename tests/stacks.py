"""Strategies for counts, and the product by expert that tests compare with."""

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts, segments
from symbiosis_priv.checkpoints.layers import Joined
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.checkpoints.weights import WeightStore

EXPERTS = 4


def stacks_of(store: WeightStore) -> dict[int, GroupEntry]:
    """The stacks of a model, by group index."""
    return {index: entry for index, entry in enumerate(store.manifest().groups) if entry.experts > 1}


def expert_counts(experts: int = EXPERTS, *, most: int = 9) -> SearchStrategy[Counts]:
    """Counts of rows: zero for every expert, all rows for one expert, or any numbers."""
    one = st.integers(0, experts - 1).map(lambda chosen: tuple(most * (k == chosen) for k in range(experts)))
    return st.just((0,) * experts) | one | st.tuples(*[st.integers(0, most)] * experts)


def expert_product(weight: Tensor, counts: Counts, rows: Tensor, direction: Direction, joined: Joined) -> Tensor:
    """The expected product by expert. int64 products wrap modulo 2^64, so their low 32 bits are those of the ring.

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
