"""The packed weights of one layer group, as a module that FSDP2 shards, gathers and frees."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from symbiosis_priv.arithmetic.ring import FORWARD, Direction, Widths
from symbiosis_priv.arithmetic.segments import Counts, segments
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.kernels import Choice, Packed, kernel_of


class Unit(nn.Module):
    """A module whose one parameter is a layer group's packed weights as bytes, on the meta device until `load`. Keeps
    no reference to the data of `whole`, which may be a mapped file. Raises `ConfigError`: weights in this layout cannot
    be cut along their outputs."""

    def __init__(self, whole: Packed, choice: Choice) -> None:
        super().__init__()
        granule = kernel_of(choice.layout).shard_granule
        if granule is None:
            raise ConfigError(f"weights packed as {choice.layout!r} cannot be sharded: choose another kernel")
        self._granule = granule
        nothing = torch.empty(0, dtype=whole.data.dtype, device="cpu")  # a view of the data would keep its file mapped
        self._whole = replace(whole, data=nothing)
        self._choice = choice
        self._dtype = whole.data.dtype
        shape = whole.data.view(torch.int8).shape
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.int8, device="meta"), requires_grad=False)

    def forward(self, rows: Tensor, direction: Direction, out: Tensor) -> None:
        """Compute the product with all weights, which FSDP gathers for this call, in `out`."""
        self._product(replace(self._whole, data=self.weight.view(self._dtype)), rows, direction, out)

    def load(self, whole: Tensor, *, rank: int, world: int, device: torch.device) -> None:
        """Copy this rank's shard from the mapped file, without reading other shards. Call this after `fully_shard`."""
        self.to_empty(device=device)
        local = self._local()
        first = _chunk(len(whole), world) * rank
        local.copy_(whole.view(torch.int8)[first : first + len(local)])

    def columns_of(self, rank: int, world: int) -> slice:
        """The outputs in the shard of a rank."""
        each = _chunk(self.weight.shape[0], world) * self._granule
        return slice(min(self._whole.outputs, each * rank), min(self._whole.outputs, each * (rank + 1)))

    def columns(self, direction: Direction, *, experts: int = 1) -> Widths:
        """The widths of a product with all weights, or with one of `experts` matrices."""
        return replace(self._whole, outputs=self._whole.outputs // experts).columns(direction)

    def multiply_experts(self, columns: slice, counts: Counts, rows: Tensor, direction: Direction, out: Tensor) -> None:
        """Compute this rank's summand of a product of rows that are sorted by expert.

        Args:
            columns: the outputs in the shard, from `columns_of`.
            counts: rows of each expert; an expert's matrix is a range of outputs.
            rows: int32 `[n, inputs]` forward, `[n, outputs of one expert]` backward.
            out: int32 `[n, outputs of one expert]` or `[n, inputs]`, zeros; written.
        """
        height = self._whole.outputs // len(counts)
        shard = replace(self._whole, outputs=columns.stop - columns.start, data=self._local().view(self._dtype))
        kernel = kernel_of(self._whole.layout)
        for expert, segment in segments(counts):
            first = expert * height
            start, stop = max(columns.start, first), min(columns.stop, first + height)
            if start >= stop:
                continue
            weights = kernel.cut(shard, start - columns.start, stop - columns.start)
            here = slice(start - first, stop - first)
            if direction == FORWARD:
                product = rows.new_empty((segment.stop - segment.start, stop - start))
                self._product(weights, rows[segment], direction, product)
                out[segment, here] = product
            else:
                self._product(weights, rows[segment, here].contiguous(), direction, out[segment])

    def multiply_shard(self, columns: slice, rows: Tensor, direction: Direction, out: Tensor) -> None:
        """Compute the product with this rank's shard only, in `out`: columns of the result forward; backward, a summand
        of it, from the shard's columns of the rows."""
        outputs = columns.stop - columns.start
        weights = replace(self._whole, outputs=outputs, data=self._local().view(self._dtype))
        if outputs:
            self._product(weights, rows, direction, out)
        else:
            out.zero_()

    def _local(self) -> Tensor:
        assert isinstance(self.weight, DTensor)  # outside `forward`
        return self.weight.to_local()

    def _product(self, weights: Packed, rows: Tensor, direction: Direction, out: Tensor) -> None:
        if out.numel():
            self._choice.kernel(direction, len(rows)).product(weights, rows, direction, out)


def _chunk(granules: int, world: int) -> int:
    """Number of granules that `Shard(0)` gives to a rank; the last ranks get fewer or none."""
    return -(-granules // world)
