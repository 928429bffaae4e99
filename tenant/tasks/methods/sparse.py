"""Sparse changes of a weight: their product by torch's sparse kernels, and PEFT's SHiRA and SuperTuning with it.

The matrix `S` `[o, d]` has n entries at fixed places. `x @ S.T` costs n multiplications per row. The gradient of the
entries is a product of two dense matrices of which only n results are computed.

SHiRA (arXiv:2406.13175) and SuperTuning (arXiv:2607.09287) change few entries of the weight. PEFT adds the entries to a
copy of the weight. An offloaded layer computes `W x`, and the tenant adds the sparse product. SuperTuning chooses its
entries by the magnitude of the weights, so it reads the weight once, at its start.
"""

import warnings
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from peft import PeftType
from peft.tuners.shira import ShiraModel
from peft.tuners.shira.layer import Linear as ShiraLinear
from peft.tuners.supertuning import SupertuningModel
from peft.tuners.supertuning.layer import Linear as SupertuningLinear
from torch import Tensor

from symbiosis_priv.errors import CheckpointError
from tenant.tasks.methods.layer import use_instead
from tenant.tasks.methods.start import OnOffloadedLayers

with warnings.catch_warnings():  # torch warns once per process that this format is in beta
    warnings.simplefilter("ignore")
    torch.eye(1, dtype=torch.float32, device="cpu").to_sparse_csr()

_BLOCK = 1 << 22  # products of one step in `entries_of`, to bound the memory of a gradient


class Pattern:
    """The places of the entries of a sparse matrix: ascending positions in the row-major matrix `shape`, integer `[n]`.
    Takes 4 bytes per entry, and 12 more once gradients are computed. Raises `CheckpointError` if the places are out of
    range or not ascending."""

    def __init__(self, places: Tensor, shape: tuple[int, int]) -> None:
        outputs, inputs = shape
        places = places.to(torch.int64)
        if places.dim() != 1 or (
            len(places) and not (places[0] >= 0 and places[-1] < outputs * inputs and (places.diff() > 0).all())
        ):
            raise CheckpointError(
                f"the adapter's places in a weight of {outputs} x {inputs} are out of range or not ascending; fetch "
                f"the adapter again"
            )
        self.shape = shape
        self.columns = (places % inputs).to(torch.int32)
        self._row_starts = _starts(places // inputs, outputs)

    @cached_property
    def rows(self) -> Tensor:
        """int32 `[n]`: the row of each entry."""
        numbers = torch.arange(self.shape[0], dtype=torch.int32, device=self.columns.device)
        return numbers.repeat_interleave(self._row_starts.diff())

    @cached_property
    def _by_column(self) -> tuple[Tensor, Tensor]:
        """Return the order of the entries in the transposed matrix, and the start of each of its rows."""
        columns, order = self.columns.sort(stable=True)
        return order.to(torch.int32), _starts(columns, self.shape[1])

    @property
    def bytes(self) -> int:
        """Bytes of the pattern."""
        held = (self.columns, self._row_starts, vars(self).get("rows"), *vars(self).get("_by_column", ()))
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def product(self, x: Tensor, entries: Tensor) -> Tensor:
        """Multiply rows by the matrix: x `[..., d]`, entries `[n]` -> `[..., o]`, in float32 or wider."""
        entries = entries.to(torch.promote_types(entries.dtype, torch.float32))
        flat = x.reshape(-1, self.shape[1]).to(entries.dtype)
        y: Tensor = _Product.apply(flat, entries, self)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], self.shape[0])

    def matrix(self, entries: Tensor) -> Tensor:
        """Return the matrix in torch's CSR format."""
        return torch.sparse_csr_tensor(self._row_starts, self.columns, entries, self.shape, check_invariants=False)

    def transposed(self, entries: Tensor) -> Tensor:
        """Return the transposed matrix in torch's CSR format."""
        order, starts = self._by_column
        shape = self.shape[::-1]
        return torch.sparse_csr_tensor(starts, self.rows[order], entries[order], shape, check_invariants=False)

    def entries_of(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the entries of `left.T @ right` at the places of this pattern: left `[r, o]`, right `[r, d]` ->
        `[n]`."""
        step = max(1, _BLOCK // max(1, len(left)))
        blocks = zip(self.rows.split(step), self.columns.split(step), strict=True)
        return torch.cat([(left[:, i] * right[:, j]).sum(0) for i, j in blocks])


class Patterns(dict[str, "_Made"]):
    """The patterns of a layer's adapters, by adapter. A pattern is made on first use, and again after its places have
    changed."""

    def of(self, adapter: str, places: Tensor, make: Callable[[], tuple[Pattern, Tensor]]) -> tuple[Pattern, Tensor]:
        """Return the pattern of an adapter and the tensor that `make` returns with it. Calls `make` again if `places`
        was written to."""
        found = self.get(adapter)
        if found is None or found.places() is not places or found.version != version(places):
            found = self[adapter] = _Made(weakref.ref(places), version(places), *make())
        return found.pattern, found.tensor

    @property
    def bytes(self) -> int:
        """Bytes of all patterns and their tensors."""
        return sum(made.pattern.bytes + made.tensor.nbytes for made in self.values())


class _Made(NamedTuple):
    places: weakref.ref[Tensor]
    version: object
    pattern: Pattern
    tensor: Tensor


def version(tensor: Tensor) -> tuple[int, ...]:
    """Return a key that changes when a tensor is written to."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, entries: Tensor, pattern: Pattern) -> Tensor:
        ctx.save_for_backward(x, entries)
        ctx.pattern = pattern
        return (pattern.matrix(entries) @ x.t()).t().contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, entries = ctx.saved_tensors
        pattern: Pattern = ctx.pattern
        to_x, to_entries, _ = ctx.needs_input_grad
        grad_x = None
        if to_x and torch.is_grad_enabled():  # with create_graph=True: operations that autograd records
            grad_x = torch.zeros_like(x).index_add(1, pattern.columns, grad[:, pattern.rows] * entries)
        elif to_x:
            grad_x = (pattern.transposed(entries) @ grad.t()).t()
        return grad_x, pattern.entries_of(grad, x) if to_entries else None, None


def _starts(sorted_numbers: Tensor, count: int) -> Tensor:
    """Return int32 `[count + 1]`: the index at which each of the numbers 0 .. count begins in a sorted list."""
    numbers = torch.arange(count + 1, dtype=sorted_numbers.dtype, device=sorted_numbers.device)
    return torch.searchsorted(sorted_numbers, numbers, out_int32=True)


class _Sparse:
    """What both modules around an offloaded layer share: a change of the entries of a weight at places, integer `[n]`
    or `[2, n]`, in any order. They add a sparse product."""

    in_features: int
    out_features: int

    @cached_property
    def patterns(self) -> Patterns:
        return Patterns()

    def sparse(self, adapter: str) -> tuple[Tensor, Tensor] | None:
        """Return the places and entries of an adapter; None if the layer does not have the adapter."""
        raise NotImplementedError

    def pattern(self, adapter: str) -> tuple[Pattern, Tensor] | None:
        """Return the pattern of an adapter and its entries, in the pattern's order."""
        if (found := self.sparse(adapter)) is None:
            return None
        places, entries = found
        shape = self.out_features, self.in_features

        def sorted_pattern() -> tuple[Pattern, Tensor]:
            flat, order = _flat(places, shape).sort()
            return Pattern(flat, shape), order

        pattern, order = self.patterns.of(adapter, places, sorted_pattern)
        return pattern, entries[order]

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.base_layer(x, *args, **kwargs)
        if not (self.disable_adapters or self.merged):
            for adapter in self.active_adapters:
                if (found := self.pattern(adapter)) is not None:
                    result = self.added(adapter, x, result + found[0].product(x, found[1]).to(result.dtype))
        return result

    def added(self, adapter: str, x: Tensor, result: Tensor) -> Tensor:
        """Return `result` with what else an adapter adds to it."""
        return result


def _flat(places: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return positions in the row-major matrix, given positions or rows and columns."""
    places = places.long()
    if places.dim() == 1:
        return places
    rows, columns = places[0], places[1]
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise CheckpointError(f"the adapter names a column outside a weight of {shape[0]} x {shape[1]}; fetch it again")
    return rows * shape[1] + columns


class RemoteShiraLinear(_Sparse, ShiraLinear):
    def sparse(self, adapter: str) -> tuple[Tensor, Tensor] | None:
        if adapter not in self.shira_weight:
            return None
        entries = self.shira_weight[adapter] * self.scaling[adapter]
        # not a buffer, so `to(device)` does not move it
        places = self.shira_indices[adapter] = self.shira_indices[adapter].to(entries.device)
        return places, entries


class RemoteShira(OnOffloadedLayers, ShiraModel):
    """SHiRA on offloaded layers too. The caller's mask function may read the weight."""

    linear = RemoteShiraLinear

    def starts_from_weight(self, config: Any) -> bool:
        return bool(config.mask_type != "random")


class RemoteSupertuningLinear(_Sparse, SupertuningLinear):  # type: ignore[misc]
    def sparse(self, adapter: str) -> tuple[Tensor, Tensor] | None:
        if adapter not in self.supertuning_values:
            return None
        return self.supertuning_indices[adapter], self.supertuning_values[adapter]

    def added(self, adapter: str, x: Tensor, result: Tensor) -> Tensor:
        """LoRA's product, with a rank."""
        if not (rank := self.supertuning_rank[adapter]):
            return result
        lora_a, lora_b = self.supertuning_lora_A[adapter], self.supertuning_lora_B[adapter]
        dropped = self.supertuning_lora_dropout[adapter](x).to(lora_a.weight.dtype)
        scaling = self.supertuning_lora_alpha[adapter] / rank
        more: Tensor = result + (scaling * lora_b(lora_a(dropped))).to(result.dtype)
        return more


class RemoteSupertuning(OnOffloadedLayers, SupertuningModel):
    linear = RemoteSupertuningLinear


use_instead(PeftType.SHIRA, RemoteShira)
use_instead(PeftType.SUPERTUNING, RemoteSupertuning)
