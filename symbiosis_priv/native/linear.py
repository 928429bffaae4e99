"""A float linear, with the compiled library (local.h). The bits of a row do not depend on the other rows."""

import torch
from torch import Tensor

from symbiosis_priv import native
from symbiosis_priv.native import FORMATS, for_each_slice

_DTYPES = (torch.float32, torch.bfloat16)
_SLICE_BYTES = 1 << 20  # of weights, which take 100 µs to read


def computes(rows: Tensor, weight: Tensor) -> bool:
    """Returns True if `linear` can multiply these tensors on this machine."""
    return (
        native.library() is not None
        and rows.is_cpu
        and weight.is_cpu
        and weight.dim() == 2
        and rows.dtype == weight.dtype
        and rows.dtype in _DTYPES
        and weight.is_contiguous()
    )


def linear(rows: Tensor, weight: Tensor) -> Tensor:
    """Compute `rows @ weight.T` with sums in float32: `[..., d]` and `[o, d]` to `[..., o]`, all of one dtype."""
    library = native.library()
    assert library is not None  # `computes` has returned True
    isa, (outputs, inputs) = native.best(library), weight.shape
    x = rows.detach().reshape(-1, inputs).float().contiguous()
    count = len(x)
    result = torch.empty((count, outputs), dtype=torch.float32, device="cpu")
    operands = x.data_ptr(), count, inputs, weight.data_ptr(), FORMATS[weight.dtype], result.data_ptr(), outputs

    def columns(begin: int, end: int) -> None:
        library.local_linear(isa, *operands, begin, end)

    row_bytes = inputs * weight.element_size() * max(1, count // 8)
    for_each_slice(columns, total=outputs, least=max(1, _SLICE_BYTES // max(1, row_bytes)))
    return result.to(rows.dtype).view(*rows.shape[:-1], outputs)
