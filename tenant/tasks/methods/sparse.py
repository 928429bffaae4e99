"""The product of rows with a sparse matrix, and its gradients, by torch's sparse kernels.

The matrix `S` `[o, d]` has n entries at fixed places. `x @ S.T` costs n multiplications per row. The gradient of the
entries is a product of two dense matrices of which only n results are computed.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from symbiosis_priv.errors import CheckpointError

with warnings.catch_warnings():  # torch warns once per process that this format is in beta
    warnings.simplefilter("ignore")
    torch.eye(1, dtype=torch.float32, device="cpu").to_sparse_csr()

_BLOCK = 1 << 22  # products of one step in `entries_of`, to bound the memory of a gradient


class Pattern:
    """The places of the entries of a sparse matrix: ascending positions in the row-major matrix `shape`, integer `[n]`.
    Takes 4 bytes per entry. Raises `CheckpointError` if the places are out of range or not ascending."""

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
        numbers = torch.arange(outputs + 1, dtype=torch.int64, device=places.device)
        self._row_starts = torch.searchsorted(places // inputs, numbers, out_int32=True)

    @property
    def rows(self) -> Tensor:
        """int32 `[n]`: the row of each entry."""
        numbers = torch.arange(self.shape[0], dtype=torch.int32, device=self.columns.device)
        return numbers.repeat_interleave(self._row_starts.diff())

    @property
    def bytes(self) -> int:
        return self.columns.nbytes + self._row_starts.nbytes

    def product(self, x: Tensor, entries: Tensor) -> Tensor:
        """Multiply rows by the matrix: x `[..., d]`, entries `[n]` -> `[..., o]`, in float32 or wider."""
        entries = entries.to(torch.promote_types(entries.dtype, torch.float32))
        flat = x.reshape(-1, self.shape[1]).to(entries.dtype)
        y: Tensor = _Product.apply(flat, entries, self)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], self.shape[0])

    def matrix(self, entries: Tensor) -> Tensor:
        """Return the matrix in torch's CSR format."""
        return torch.sparse_csr_tensor(self._row_starts, self.columns, entries, self.shape, check_invariants=False)

    def entries_of(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the entries of `left.T @ right` at the places of this pattern: left `[r, o]`, right `[r, d]` ->
        `[n]`."""
        step = max(1, _BLOCK // max(1, len(left)))
        blocks = zip(self.rows.split(step), self.columns.split(step), strict=True)
        return torch.cat([(left[:, i] * right[:, j]).sum(0) for i, j in blocks])


class Patterns(dict[str, tuple[Tensor, object, Pattern, Tensor]]):
    """The patterns of a layer's adapters, by adapter: places, their version, the pattern, and a tensor made with it."""

    def of(self, adapter: str, places: Tensor, make: Callable[[], tuple[Pattern, Tensor]]) -> tuple[Pattern, Tensor]:
        """Return the pattern of an adapter and the tensor that `make` returns with it. Calls `make` on first use, and
        again if `places` was written to."""
        found = self.get(adapter)
        if found is None or found[0] is not places or found[1] != version(places):
            found = self[adapter] = places, version(places), *make()
        return found[2:]

    @property
    def bytes(self) -> int:
        return sum(pattern.bytes + tensor.nbytes for _, _, pattern, tensor in self.values())


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
            grad_x = (pattern.matrix(entries).t() @ grad.t()).t()
        return grad_x, pattern.entries_of(grad, x) if to_entries else None, None
