"""Makes local functions of rows return the same bits for a row in every step, whatever the other rows are.

Products of providers are exact. A local matrix product is not: BLAS chooses the order of additions by the number of
rows. Neither are functions such as `tanh`: the vectorised code and the code for the last elements differ in the last
bit, and the number of rows decides which of them computes an element.

    linear      the compiled library has one whose rows do not depend on each other (`native.linear`)
    products    otherwise in blocks of `ROWS` rows, so each call has the same shape. At the first call of a shape,
                `RowBlocks` tests that a row's place in the block does not matter; if it does, rows are computed one at
                a time.
    functions   rows of whole vectors together, as far as no thread gets a part of a vector; all others one at a time
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from symbiosis_priv.native import can_multiply, linear

log = logging.getLogger(__name__)

ROWS = 8
"""Rows of a block."""
_POINTWISE = ("sigmoid", "tanh", "exp", "exp2", "expm1", "log", "log1p", "erf", "sin", "cos")
_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    (
        *(getattr(kind, name) for kind in (torch, Tensor) for name in _POINTWISE),
        *(F.silu, F.gelu, F.softplus, F.mish, F.elu, F.selu, F.logsigmoid),
    )
)
_ROWS_AT: dict[Callable[..., Any], int] = {F.linear: 0, torch.addmm: 1, **dict.fromkeys(_FUNCTIONS, 0)}
"""The index of the argument whose first dimension is rows, by function."""
_VECTORS = 64  # elements that torch's loops compute at a time: two vectors of 512 bits with 16 bits per element
_SERIAL = 1 << 14  # elements up to which a loop is either serial or divided between all threads


class RowBlocks(TorchFunctionMode):
    """While this mode is active, a row of a local function does not depend on the other rows."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[tuple[object, ...], int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        at = _ROWS_AT.get(func)
        if at is None or len(args) <= at or args[at].dim() < 2 or kwargs.get("inplace") or "out" in kwargs:
            return func(*args, **kwargs)
        rows = args[at]
        if func is F.linear and len(args) > 1 and can_multiply(rows, args[1]):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return linear(rows, args[1]) if bias is None else linear(rows, args[1]) + bias

        def compute(block: Tensor) -> Tensor:
            result: Tensor = func(*args[:at], block, *args[at + 1 :], **kwargs)
            return result

        if func in _FUNCTIONS:
            # vectorised code must compute every element: so many rows may be computed together
            width = rows.shape[1:].numel()
            threads = torch.get_num_threads() if rows.is_cpu else 1
            together = max(1, _SERIAL // width) if width and width % (_VECTORS * threads) == 0 else 1
            if len(rows) <= together:
                return compute(rows.contiguous())
            # copies, so that each part is aligned like a single row
            return torch.cat([compute(part.clone()) for part in rows.contiguous().split(together)])
        others = tuple(tuple(other.shape) if isinstance(other, Tensor) else other for other in args[at + 1 :])
        key = (func, rows.shape[1:], rows.dtype, others)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = _size(compute, rows)
            if size == 1:
                log.info("%s of rows %s: one row at a time", func.__name__, list(rows.shape[1:]))
        count = len(rows)
        if not count:
            return compute(rows)
        missing = -count % size
        if missing or not rows.is_contiguous():
            filled = rows.new_zeros((count + missing, *rows.shape[1:]))
            filled[:count] = rows
            rows = filled
        blocks = [compute(block) for block in rows.split(size)]
        return (torch.cat(blocks) if len(blocks) > 1 else blocks[0])[:count]


def _size(compute: Callable[[Tensor], Tensor], like: Tensor) -> int:
    """Return `ROWS` if `compute` returns the same bits for a row at each place of a block of `ROWS` rows; otherwise
    1."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    shape = (ROWS, *like.shape[1:])
    rows = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(like)
    expected = compute(rows)
    moved = (compute(rows.roll(by, 0)).roll(-by, 0) for by in range(1, ROWS))
    return ROWS if all(torch.equal(expected, result) for result in moved) else 1
